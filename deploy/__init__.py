"""Ways to run Reprise."""

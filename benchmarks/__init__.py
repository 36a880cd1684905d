"""Measurements as commands: `python -m benchmarks.NAME [--json]`."""

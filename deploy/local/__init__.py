"""One machine: the `reprise` command, the embedded broker, the supervisor, the report."""

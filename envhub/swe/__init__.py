"""The `swe` environment: Python repositories with bugs to repair."""

"""The `code` environment: programs to write."""

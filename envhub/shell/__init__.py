"""The `shell` environment: questions about files and changes of them, in bash."""

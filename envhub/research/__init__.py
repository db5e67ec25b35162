"""The `research` environment: questions about a corpus of pages and files."""

"""The `web` environment: errands on a web site."""

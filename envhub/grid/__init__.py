"""The `grid` environment: small games in text."""

"""Which settings there are."""

"""Who earned what: an advantage for every token."""

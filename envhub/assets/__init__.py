"""Benchmarks that are read from the user's own copies of their files."""

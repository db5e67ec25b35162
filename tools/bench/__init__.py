"""Benchmarks: each measures a ratio to a limit or to another system in the same run."""

"""Servers of our environments."""

"""Clients of environment servers."""

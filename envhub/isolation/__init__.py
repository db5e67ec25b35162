"""Isolation of environments from their actor: the sandbox, separate processes, separate threads."""

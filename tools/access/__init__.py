"""How hosts are let in: keys, Redis users, and the command that a new one is given."""

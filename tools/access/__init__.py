"""How hosts join a fleet: keys, Redis users, and the command that a new one is given."""

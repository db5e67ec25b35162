"""How episodes are played, and how an actor gets its weights."""

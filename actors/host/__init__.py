"""How an actor joins a run, stays in it and leaves it."""

"""How fast and how exact an actor is on a GPU."""

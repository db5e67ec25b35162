"""How one attempt at a task is played, from the first prompt to its record."""

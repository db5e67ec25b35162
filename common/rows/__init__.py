"""How the rows of a file of the user's are read."""

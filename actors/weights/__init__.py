"""How the weights of a version arrive, and from where."""

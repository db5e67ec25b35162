"""How a tree of attempts is searched, without a run."""

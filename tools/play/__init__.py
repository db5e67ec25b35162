"""How episodes are played and scored without a run."""

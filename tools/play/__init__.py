"""How episodes are played, scored and served without a run."""

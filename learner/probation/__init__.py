"""Whether an objective is sound, before a run."""

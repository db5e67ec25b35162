"""How a run's numbers reach other trackers."""

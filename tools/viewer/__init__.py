"""How a run is shown in a browser: its report, and the episodes of its archive."""

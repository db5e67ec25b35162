"""Studies: the effect of a setting, measured over seeds."""

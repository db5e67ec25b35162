"""Which processes take part, and which weights are on offer."""

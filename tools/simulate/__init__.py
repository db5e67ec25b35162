"""How a run would go with another fleet."""

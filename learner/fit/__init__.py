"""How a model is fitted to recorded conversations."""

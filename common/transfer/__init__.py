"""How weights are described, checked and moved."""

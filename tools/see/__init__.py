"""How a run is watched and reported."""

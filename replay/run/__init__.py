"""What state a run is in, and what its archive has."""

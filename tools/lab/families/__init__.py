"""Which families of models train exactly."""

"""Where trajectories, weights on offer and processes are booked."""

"""What fleets of actors do, in simulated and in real time."""

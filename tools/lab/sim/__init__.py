"""Whether a run survives any schedule of faults: learner, actors, network, disk and clock in one seeded process."""

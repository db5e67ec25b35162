"""Whether the learner computes on a GPU what it computes on a CPU."""

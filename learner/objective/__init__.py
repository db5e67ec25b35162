"""The parts of the objective, as pure functions of numbers; it imports nothing else of the learner."""

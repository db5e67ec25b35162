"""The parts of a reward beside the environment's own: measures of an episode, functions of the user's, judges."""

"""Which environments there are, and what an environment is."""

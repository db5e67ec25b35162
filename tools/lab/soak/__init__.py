"""Stand-ins for learner, actors and engine, and whether their books balance."""

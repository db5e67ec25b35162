"""The `slipstream replay` verbs: inspect a run's buffer and archive, and repair the buffer."""

"""The `household` environment: things to find, treat and put away in a room."""

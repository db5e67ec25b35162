"""What TRL and a loop by hand do with the same task."""

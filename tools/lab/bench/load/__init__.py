"""What plays and trains while a benchmark measures."""

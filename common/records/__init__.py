"""What is recorded of an episode."""

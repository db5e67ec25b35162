"""What is stored, under which keys."""

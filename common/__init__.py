"""What at least two rooms share."""

"""Whether the books balance after random faults."""

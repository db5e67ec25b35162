"""One optimizer step, and what it measures."""

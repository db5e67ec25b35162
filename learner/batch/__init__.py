"""How sequences become micro-batches."""

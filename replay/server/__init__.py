"""Which Redis server a run has."""

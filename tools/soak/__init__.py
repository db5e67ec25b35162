"""Long runs of stand-ins under faults: soak and chaos."""

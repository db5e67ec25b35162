"""The packed model with its heads and adapters, and operations on its weights."""

"""The `kg` environment: questions about a knowledge graph."""

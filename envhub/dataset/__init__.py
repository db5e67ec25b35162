"""The `dataset` environment: questions from a file, scored by a check."""

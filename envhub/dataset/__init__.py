"""The `dataset` environment: questions from a file, scored by checks and by functions of the user's."""

"""Publishes weights from the learner: broadcasts them, serves them to pulling actors, stores them on disk."""

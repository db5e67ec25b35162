"""Which verbs there are, and what they take."""

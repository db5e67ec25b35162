"""How the ranks of a learner agree."""

"""How stages of training follow one another."""

"""How files of conversations are read, cleaned and described; and a model in a file."""

"""What is printed to a terminal, and how options are declared."""

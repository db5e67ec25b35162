"""What makes and checks the docs."""

"""What is written so that a run can continue."""

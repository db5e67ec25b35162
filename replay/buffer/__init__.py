"""What can be done with a group, and by whom."""

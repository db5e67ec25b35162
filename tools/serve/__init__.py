"""What Slipstream serves to others: rewards, and environments."""

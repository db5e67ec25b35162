"""What a choice of objective, pace or data does to learning."""

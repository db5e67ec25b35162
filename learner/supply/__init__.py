"""What comes in: which tasks are opened, and which groups a step takes."""

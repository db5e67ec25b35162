"""What only we run; nothing imports it."""

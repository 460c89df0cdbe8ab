"""What of a program is saved for its backward pass."""

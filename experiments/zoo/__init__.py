"""Stock networks as their users write them, and their training steps."""

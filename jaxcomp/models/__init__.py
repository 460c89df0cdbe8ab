"""Models whose activations are stored by rules."""

"""Scripts that repeat published studies."""

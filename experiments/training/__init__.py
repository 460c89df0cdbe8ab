"""A training run: its configuration, steps, checkpoints, processes and progress."""

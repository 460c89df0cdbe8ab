"""Tables of README.md and docs/, made from the records under experiments/results."""

"""Benchmarks that write JSON and Markdown under experiments/results."""

"""Runs schedules: the forward pass that stores, and the backward pass that rebuilds."""

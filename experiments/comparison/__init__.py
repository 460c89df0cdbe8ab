"""Trains by several strategies and compares what comes out."""

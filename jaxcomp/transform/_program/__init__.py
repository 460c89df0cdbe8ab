"""Traced programs: reading, writing and rewriting them."""

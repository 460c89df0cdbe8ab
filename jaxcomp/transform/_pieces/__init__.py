"""Blocks whose backward pass is evaluated piece by piece."""

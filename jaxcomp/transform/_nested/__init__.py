"""Loops and conditionals, whose bodies store by schedules of their own."""

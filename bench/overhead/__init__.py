"""The gap between two decode steps, on the clocks of the ranks."""

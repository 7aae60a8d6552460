"""Placement of keys and values: contexts, segments, and the blocks of each rank."""

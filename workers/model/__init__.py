"""Transformers models whose attention and rotary positions are computed in `workers.step`."""

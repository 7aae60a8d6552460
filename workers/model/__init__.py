"""Transformers models whose attention and rotary positions are handled by the step."""

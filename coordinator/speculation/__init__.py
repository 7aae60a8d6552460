"""Speculative decoding: drafts from a sequence's tokens, and the number of drafts that is worth a step."""

"""Markdown pages of results, rendered from templates of the same shape."""

"""Choosing tokens: rows together, against one by one as it was."""

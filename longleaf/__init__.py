"""Longleaf: exact generation over contexts that no single GPU can hold.

This package is what coordinator, workers and users share. It knows the mathematics, the words and the wire;
it must not know Ray.
"""

__version__ = "0.1.0"

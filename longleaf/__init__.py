"""Longleaf: exact generation over contexts that do not fit on a single GPU.

This package is shared by the coordinator, the workers and the users. It contains the mathematics, the data types and
the wire formats, and must not depend on Ray.
"""

__version__ = "0.1.0"

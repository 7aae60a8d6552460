"""How ranks exchange tensors. Knows no attention and no Ray."""

from longleaf.comm.base import Comm

__all__ = ["Comm"]

"""How ranks exchange tensors. Knows no attention and no Ray."""

from longleaf.comm.base import Comm, Groups

__all__ = ["Comm", "Groups"]

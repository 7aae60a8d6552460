"""How ranks exchange tensors. Knows no attention and no Ray."""

from longleaf.comm.base import AsyncComm, Comm, Groups, Transfer

__all__ = ["AsyncComm", "Comm", "Groups", "Transfer"]

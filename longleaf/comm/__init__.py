"""Tensor exchange between ranks. Must not depend on attention or Ray."""

from longleaf.comm.base import Comm, Groups

__all__ = ["Comm", "Groups"]

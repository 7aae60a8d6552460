"""Tensor exchange between ranks. Must not depend on attention or Ray."""

from longleaf.comm.base import AsyncComm, Comm, Groups, Transfer

__all__ = ["AsyncComm", "Comm", "Groups", "Transfer"]

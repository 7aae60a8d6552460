"""Counts what ranks send to each other, from the tensors themselves."""

from torch import Tensor

from longleaf.comm import Comm
from longleaf.comm.base import ReduceOp


class CountingComm:
    """A Comm that notes its collectives and the bytes that this rank gives away.

    An all-gather or an all-to-all gives each other rank its tensor once. An all-reduce counts as what a ring gives
    away, 2 (N - 1) / N of the tensor, the least that any all-reduce can do; a broadcast as N - 1 tensors of rank 0.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.transport = comm.transport
        self.collectives = 0
        self.bytes_sent = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes * (self.world_size - 1))
        return self._comm.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes * (self.world_size - 1) // self.world_size)
        return self._comm.all_to_all(tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        self._count(2 * tensor.nbytes * (self.world_size - 1) // self.world_size)
        return self._comm.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes * (self.world_size - 1) if self.rank == 0 else 0)
        return self._comm.broadcast(tensor)

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        self._count(tensor.nbytes if to != self.rank else 0)
        return self._comm.permute(tensor, to, source)

    def _count(self, num_bytes: int) -> None:
        self.collectives += 1
        self.bytes_sent += num_bytes

"""Ranks as threads of one process: the Comm of tests and of programs without torch.distributed."""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.harness.async_comm import Transfer
from longleaf.comm.base import Groups, ReduceOp, Transport
from longleaf.topology import Topology


class ThreadRendezvous:
    """Rendezvous of the threads of one group. A thread that fails breaks the barrier, so that the others fail too."""

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout)
        self.tensors: list[Tensor | None] = [None] * world_size


class LoopbackComm:
    """One thread's handle of a ThreadRendezvous."""

    def __init__(self, rank: int, world_size: int, rendezvous: ThreadRendezvous) -> None:
        self.transport: Transport = "loopback"
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor, lambda tensors: torch.stack(tensors))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor, lambda tensors: torch.stack([t[self.rank] for t in tensors]))

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        reduce = torch.amax if op == "max" else torch.sum
        return self._exchange(tensor, lambda tensors: reduce(torch.stack(tensors), dim=0))

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor, lambda tensors: tensors[0].clone())

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        return self._exchange(tensor, lambda tensors: tensors[source].clone())

    def start_permute(self, tensor: Tensor, out: Tensor, to: int, source: int) -> Transfer:
        """The transfer is complete on return, because threads read each other's memory."""
        self._exchange(tensor, lambda tensors: out.copy_(tensors[source]))
        return Transfer(())

    def _exchange(self, tensor: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        rendezvous = self._rendezvous
        rendezvous.tensors[self.rank] = tensor
        rendezvous.barrier.wait()
        result = read([t for t in rendezvous.tensors if t is not None])
        rendezvous.barrier.wait()  # no thread may publish its next tensor before all have read this one
        return result

    def abort(self) -> None:
        """Makes all waiting threads raise BrokenBarrierError."""
        self._rendezvous.barrier.abort()


def loopback(world_size: int) -> list[LoopbackComm]:
    """The handles of a new group, one per thread."""
    rendezvous = ThreadRendezvous(world_size)
    return [LoopbackComm(rank, world_size, rendezvous) for rank in range(world_size)]


def loopback_groups(topology: Topology) -> list[Groups]:
    """The groups of each thread, as if the ranks ran on the machines of `topology`."""
    worlds = loopback(topology.world_size)
    if len(topology.node_groups) == 1:
        return [Groups(topology, world, world, None) for world in worlds]
    nodes = _ends(topology.node_groups)
    rails = _ends(topology.full_rails)
    return [Groups(topology, world, nodes[rank], rails.get(rank)) for rank, world in enumerate(worlds)]


def _ends(groups: Sequence[Sequence[int]]) -> dict[int, LoopbackComm]:
    """The handle of each rank in its group, by world rank."""
    return {rank: end for group in groups for rank, end in zip(group, loopback(len(group)), strict=True)}

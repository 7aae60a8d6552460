"""A Comm that counts its operations and the bytes that this rank sends."""

from torch import Tensor

from longleaf.comm.base import Comm, Groups, ReduceOp, Transport


class CountingComm:
    """Delegates all operations to another Comm and returns its results.

    `num_operations` counts calls; `bytes_sent` counts payload bytes from this rank to others. In shared memory a
    message is written once, regardless of the number of readers. Over a network (including loopback) it is counted
    once per reader. The algorithms of the library are assumed to be a ring for all-gather and all-reduce, and direct
    sends from rank 0 to each other rank for a broadcast.
    """

    def __init__(self, comm: Comm) -> None:
        self.transport: Transport = comm.transport
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.num_operations = 0
        self.bytes_sent = 0
        self._comm = comm
        others = comm.world_size - 1
        is_common = comm.transport == "shared_memory"
        self._copies = min(others, 1) if is_common else others
        """How often a message for all ranks is sent."""
        self._reduced = self._copies if is_common else 2 * others / comm.world_size

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes * self._copies)
        return self._comm.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes // self.world_size * (self.world_size - 1))
        return self._comm.all_to_all(tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        self._count(round(tensor.nbytes * self._reduced))
        return self._comm.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes * self._copies if self.rank == 0 else 0)
        return self._comm.broadcast(tensor)

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        self._count(tensor.nbytes if to != self.rank else 0)
        return self._comm.permute(tensor, to, source)

    def reset(self) -> None:
        """Resets the counters."""
        self.num_operations = self.bytes_sent = 0

    def _count(self, num_bytes: int) -> None:
        self.num_operations += 1
        self.bytes_sent += num_bytes


def counting(groups: Groups) -> tuple[Groups, tuple[CountingComm, ...]]:
    """The groups with each Comm wrapped in a CountingComm, and these counters. Node and world share one counter if they
    are the same Comm."""
    world = CountingComm(groups.world)
    node = world if groups.node is groups.world else CountingComm(groups.node)
    rail = CountingComm(groups.rail) if groups.rail is not None else None
    counters = dict.fromkeys(counter for counter in (world, node, rail) if counter is not None)
    return Groups(groups.topology, world, node, rail), tuple(counters)

"""The collective operations that merges are made of, and the groups of ranks that they run in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from longleaf.topology import Topology

ReduceOp = Literal["max", "sum"]
Transport = Literal["loopback", "gloo", "nccl", "shared_memory"]


class Comm(Protocol):
    """One rank's end of a group. Every rank calls the same operations in the same order, with equal shapes.
    Shared memory raises CollectiveMismatch where they do not; what libraries do then is theirs.

    `rank` and `world_size` count within the group. A result may lie in memory that the transport uses again: it is
    valid until this rank's next operation on the same Comm.
    """

    transport: Transport
    """What carries the tensors."""
    rank: int
    world_size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, stacked in rank order: [N, *shape]."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends tensor[r] to rank r and returns what the ranks sent here, in rank order: [N, *rest] both ways."""
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """Elementwise maximum or sum over the ranks."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank."""
        ...

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        """Sends the tensor to rank `to` and returns what rank `source` sends here.

        The ranks' choices must match. A rank that names itself sends nothing, or gets its own tensor back.
        """
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """A permutation under way. Neither of its tensors may be written, nor the received one read, before `wait`."""

    works: Sequence[Any]

    def wait(self) -> None:
        """Returns when this rank's tensor has left and its peer's has arrived."""
        for work in self.works:
            work.wait()


class AsyncComm(Comm, Protocol):
    """A Comm that can compute while tensors travel."""

    def start_permute(self, tensor: Tensor, out: Tensor, to: int, source: int) -> Transfer:
        """Begins to send `tensor` to rank `to` and to receive from rank `source` into `out`.

        Both contiguous, of any sizes, and `out` like the tensor that `source` sends; nothing is sent for an empty one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """One rank's ends of the groups of an epoch."""

    topology: Topology
    world: Comm
    node: Comm
    """The ranks of this rank's machine."""
    rail: Comm | None
    """The ranks with this rank's index on their machines; None where some machine has no such rank, and where there is
    one machine only."""

    @property
    def inside_transport(self) -> str:
        """What carries tensors among the ranks of a machine; empty where no machine has several."""
        return self.node.transport if any(len(ranks) > 1 for ranks in self.topology.node_groups) else ""

    @property
    def between_transport(self) -> str:
        """What carries them between machines; empty where there is one."""
        return self.world.transport if len(self.topology.node_groups) > 1 else ""

    @property
    def transport(self) -> str:
        """What carries tensors, inside the machines first."""
        return " + ".join(dict.fromkeys((self.node.transport, self.world.transport)))

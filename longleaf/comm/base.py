"""Interfaces of the collective operations used by merges, and of the process groups."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from longleaf.topology import Topology

ReduceOp = Literal["max", "sum"]
Transport = Literal["loopback", "gloo", "nccl", "shared_memory"]


class Comm(Protocol):
    """One rank's handle of a group. Every rank calls the same operations in the same order, with equal shapes. Shared
    memory raises CollectiveMismatch for violations; with gloo and NCCL the behavior is undefined.

    `rank` and `world_size` count within the group. A result may use memory of the transport: it is valid until this
    rank's next operation on the same Comm.
    """

    transport: Transport
    """Transport of the tensors."""
    rank: int
    world_size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked in rank order: [N, *shape]."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends tensor[r] to rank r and returns the received tensors in rank order: [N, *rest] both ways."""
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """Elementwise maximum or sum over the ranks."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Returns the tensor of rank 0 on every rank."""
        ...

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        """Sends the tensor to rank `to` and returns the tensor from rank `source`.

        The arguments of all ranks must form a permutation. A rank that names itself sends nothing, or receives its own
        tensor.
        """
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """One rank's handles of the groups of an epoch."""

    topology: Topology
    world: Comm
    node: Comm
    """The ranks of this rank's machine."""
    rail: Comm | None
    """The ranks with this rank's index on their machines; None if some machine has no such rank, or if there is only
    one machine."""

    @property
    def intra_node_transport(self) -> str:
        """Transport between the ranks of a machine; empty if no machine has several."""
        return self.node.transport if any(len(ranks) > 1 for ranks in self.topology.node_groups) else ""

    @property
    def inter_node_transport(self) -> str:
        """Transport between machines; empty if there is only one."""
        return self.world.transport if len(self.topology.node_groups) > 1 else ""

    @property
    def transport(self) -> str:
        """All transports, the one inside machines first."""
        return " + ".join(dict.fromkeys((self.node.transport, self.world.transport)))

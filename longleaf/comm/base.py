"""The collective operations that merges are made of."""

from typing import Literal, Protocol

from torch import Tensor

ReduceOp = Literal["max", "sum"]


class Comm(Protocol):
    """One rank's end of a group. Every rank calls the same operations in the same order, with equal shapes."""

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

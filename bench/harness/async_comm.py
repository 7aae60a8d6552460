"""A Comm that can compute during transfers, for the baselines with rings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch import distributed as dist

from longleaf.comm import Comm
from longleaf.comm.process_group import ProcessGroupComm


@dataclass(frozen=True, slots=True)
class Transfer:
    """A permutation in progress. Before `wait`, neither tensor may be written, and the received one must not be
    read."""

    works: Sequence[Any]

    def wait(self) -> None:
        """Blocks until this rank's tensor is sent and the peer's is received."""
        for work in self.works:
            work.wait()


class AsyncComm(Comm, Protocol):
    """A Comm that can compute during transfers."""

    def start_permute(self, tensor: Tensor, out: Tensor, to: int, source: int) -> Transfer:
        """Starts sending `tensor` to rank `to` and receiving from rank `source` into `out`.

        Both tensors must be contiguous, and `out` must match the tensor that `source` sends. Empty tensors are not
        sent.
        """
        ...


class AsyncGroupComm(ProcessGroupComm):
    """AsyncComm over torch.distributed."""

    def start_permute(self, tensor: Tensor, out: Tensor, to: int, source: int) -> Transfer:
        operations: list[Any] = []
        if out.numel():  # first, as in `permute`
            operations.append(dist.P2POp(dist.irecv, out, group=self._group, group_peer=source))
        if tensor.numel():
            operations.append(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=to))
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works)

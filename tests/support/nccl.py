"""Ranks as threads that meet over a pretended NCCL, for epochs that are formed and ended."""

from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

from longleaf.comm import process_group
from longleaf.comm.base import Groups
from longleaf.comm.process_group import ProcessGroups, agree_on_carrier, epoch_store
from longleaf.topology import Topology
from tests.support.fakes.torch_distributed import FakeDistributed

T = TypeVar("T")
DEVICE = "cpu:0"
"""Where tensors lie, which are those of GPUs to NCCL."""


class Fleet:
    """A rank for each letter of `machines`, the machine that it runs on. All that they ask of NCCL is in `calls`."""

    def __init__(self, machines: str) -> None:
        self.topology = Topology(tuple(machines))
        self.calls = FakeDistributed(len(machines))

    def run(self, work: Callable[[int, Groups], T], *, num_epochs: int = 2) -> list[T]:
        """The results of `work(rank, groups)` for each rank in the last epoch. All ranks close the earlier epochs in
        order, and abort the last one. Raises the first error of a rank, and CollectiveMismatch for calls that some
        ranks missed.
        """

        def one_epoch(rank: int, epoch: int) -> T:
            store, size = self.calls.store, self.topology.world_size
            carrier = agree_on_carrier(rank, size, epoch_store(store, epoch), DEVICE, timeout=60)
            owner = ProcessGroups(rank, self.topology, store, epoch=epoch, timeout=60, carrier=carrier)
            found = work(rank, owner.groups)
            owner.close() if epoch < num_epochs else owner.abort()
            return found

        def live(rank: int) -> T:
            return [one_epoch(rank, epoch) for epoch in range(1, num_epochs + 1)][-1]

        with (
            patch.object(process_group, "dist", self.calls),
            patch.object(process_group, "place_of", lambda _: f"GPU-{self.calls.own_rank}"),
        ):
            results = self.calls.run(live)
        self.calls.check()
        return results

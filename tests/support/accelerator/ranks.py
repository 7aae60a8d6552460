"""A rank on the pretended accelerator, and a scheduler that plans its steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from longleaf.comm import Comm, Groups
from longleaf.comm.base import ReduceOp, Transport
from longleaf.kernels import registry
from longleaf.kernels.backend import Backend
from longleaf.kernels.dense import DenseBackend
from longleaf.rank_protocol.group_messages import Join
from longleaf.rank_protocol.step import Prefill, StepPlan
from longleaf.topology import Topology
from tests.support.accelerator.device import Accelerator
from tests.support.accelerator.dispatch import DEVICE
from tests.support.accelerator.events import Log
from tests.support.accelerator.launcher import CountingLauncher
from tests.support.scheduling import Bench
from tests.support.threads import config_for, make_spec
from workers import rank as ranks
from workers.cuda_graphs.graphs import Work
from workers.rank import Rank


class Step(NamedTuple):
    """A step, and its device operations."""

    plan: StepPlan
    log: Log


MakeBackend = Callable[[CountingLauncher], Backend]


def dense(launcher: CountingLauncher) -> Backend:
    """Kernels that are torch's own operations."""
    return DenseBackend()


KV_BYTES = 16 << 30
"""The size of the simulated pools."""


class PretendedComm:
    """Implements longleaf.comm.Comm: data from other ranks has the right shape but no values."""

    transport: Transport = "nccl"

    def __init__(self, log: Log, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._log = log

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange("all_gather", tensor.contiguous().new_empty((self.world_size, *tensor.shape)))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self._exchange("all_to_all", torch.empty_like(tensor.contiguous()))

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        return self._exchange("all_reduce", tensor.clone(memory_format=torch.contiguous_format))

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._exchange("broadcast", tensor.contiguous())

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        return self._exchange("permute", torch.empty_like(tensor.contiguous()))

    def _exchange(self, name: str, out: Tensor) -> Tensor:
        self._log.add("exchange", name, out.nbytes)
        return out


class PretendedGraphs:
    """Implements workers.cuda_graphs.graphs.Graphs: a replay counts as one launch, independent of the captured work."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def check_room(self) -> None:
        """There is always room."""

    def release(self) -> None:
        """Nothing is held."""

    def capture(self, work: Work) -> Work:
        work()
        return lambda: self._log.add("launch", "graph")


class PretendedRank:
    """A rank of `world_size` that is loaded and joined, with a bench whose plans it executes. `make_backend` gets the
    kernel launcher; kernels are not probed, because there are no values."""

    def __init__(
        self,
        folder: Path,
        world_size: int = 1,
        make_backend: MakeBackend = dense,
        rank: int = 0,
        is_captured: bool = False,
        **settings: object,
    ) -> None:
        self.accelerator = Accelerator()
        defaults = {"kv_bytes": KV_BYTES, "merge": "exchange", "block_size": 128, "max_sequences": 16}
        self.config = config_for(folder, world_size=world_size, **(defaults | settings))
        with (
            self.accelerator.running(),
            patch.object(ranks, "choose_device", lambda *_: DEVICE),
            patch.object(registry, "choose", lambda *_: make_backend(self.accelerator.launcher)),
        ):
            self.rank = Rank(make_spec(rank, self.config))
            self.rank.load()
            self.rank.graphs = PretendedGraphs(self.accelerator.log) if is_captured else None
            comm: Comm = PretendedComm(self.accelerator.log, rank, world_size)
            groups = Groups(Topology(("here",) * world_size), comm, comm, None)
            ready = self.rank.connect(groups) if world_size > 1 else self.rank.join(Join(1, 0, "", 0, ("here",)))
        self.loading = self.accelerator.log.take()
        same = ("model", "chunk_size", "block_size", "replicate_below", "window_keys", "max_sequences")
        self.bench = Bench(
            blocks=(ready.num_blocks,) * world_size,
            max_positions=1 << 24,
            windows=ready.windows,
            check_every=1 << 30,
            world_size=world_size,
            **{name: getattr(self.config, name) for name in same},
        )

    def read(self, count: int, context: str = "book") -> None:
        """Starts a context of `count` tokens, without computing its keys."""
        self.bench.ingest(context, count)
        assert not list(self.steps(computes_chunks=False))

    def steps(self, *, computes_chunks: bool = True) -> Iterator[Step]:
        """Executes all pending work, step by step. Chunks that are not computed are only recorded by the rank."""
        while (plan := self.bench.schedule()) is not None:
            if isinstance(plan.work, Prefill) and not computes_chunks:
                self._record_placement(plan.work)
            else:
                yield Step(plan, self.logged(plan))
            self.bench.commit(plan)

    def logged(self, plan: StepPlan) -> Log:
        """Executes a step, and returns its device requests."""
        with self.accelerator.running():
            self.rank.execute(plan)
        return self.accelerator.log.take()

    def _record_placement(self, work: Prefill) -> None:
        """Which blocks hold a chunk is noted where its inputs are built."""
        assert self.rank.epoch is not None
        with self.accelerator.running():
            self.rank.epoch._prefill._inputs.prefill(work)
        self.accelerator.log.take()

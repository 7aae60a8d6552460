"""Ranks on the CPU whose decode steps are those of a device: its buffers, tables and kernels, and graphs of them.

Kernels are those of `reference_kernels`, or of Triton's interpreter. Fleets that are given the same plans must come to
the same bits, whether their steps are launched as they come or replayed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch

from longleaf.comm import Groups
from longleaf.kernels import registry
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.launch import Launcher
from longleaf.rank_protocol.group_messages import Join, MergeTiming, Ready
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.step import StepPlan, StepResult
from longleaf.topology import Topology
from tests.support.fakes.cuda_graphs import OpRecorder, RecordedGraphs
from tests.support.loopback import loopback_groups
from tests.support.threads import config_for, make_spec
from workers.cuda_graphs.steps import FixedSteps
from workers.kv_cache.quantized import QuantizedPool
from workers.rank import Rank
from workers.rank_runtime import StepHandle
from workers.sampling.device_sampler import DeviceSampler
from workers.step.last_tokens import DeviceIds

T = TypeVar("T")
NUM_MULTIPROCESSORS = 2
"""Each program takes milliseconds."""


class DeviceRank(Rank):
    """A rank that takes the CPU for a device; with graphs its steps are captured."""

    def __init__(self, spec: RankSpec, graphs: RecordedGraphs | None, launcher: Launcher) -> None:
        super().__init__(spec)
        num_sequences = spec.config.max_sequences
        self.recorded = graphs
        self._launcher = graphs.launcher(launcher) if graphs else launcher
        self.sampler = DeviceSampler("cpu", num_sequences)
        self.last_ids = DeviceIds(num_sequences, "cpu")

    def load(self, parts: Sequence[int] = ()) -> None:
        kernels = TritonKernels(NUM_MULTIPROCESSORS, self._launcher)
        with patch.object(registry, "choose", lambda *_: kernels):
            super().load(parts)
        self.graphs = self.recorded
        for retained in self.tensors():
            retained.zero_()  # unwritten memory must be the same everywhere

    def connect(self, groups: Groups | None, merges: Sequence[MergeTiming] = ()) -> Ready:
        if self.recorded is not None and groups is not None:
            comm = self.recorded.comm(groups.world)
            groups = Groups(groups.topology, comm, comm, None)
        return super().connect(groups, merges)

    def start(self, plan: StepPlan) -> StepHandle:
        """Never done before a caller waits for it, as on a slow device."""
        return StepHandle(lambda: False, super().start(plan).result)

    @property
    def fixed(self) -> FixedSteps | None:
        """The captured and launched steps, once it has joined."""
        return self.epoch and self.epoch._decode._fixed

    def tensors(self) -> list[torch.Tensor]:
        """All memory of the pool."""
        layers = self.pool._layers if isinstance(self.pool, QuantizedPool) else self.pool._stored
        return [tensor for layer in layers.values() for tensor in layer if isinstance(tensor, torch.Tensor)]


class DeviceFleet:
    """All ranks of a fleet, each a thread."""

    def __init__(
        self,
        folder: Path,
        launcher: Launcher,
        *,
        is_captured: bool,
        make_graphs: Callable[[int], RecordedGraphs] = lambda _: RecordedGraphs(),
        **settings: object,
    ) -> None:
        """If it is captured, a rank's graphs are made by its number."""
        self.config = config = config_for(folder, **settings)
        self.ranks = [
            DeviceRank(make_spec(number, config), make_graphs(number) if is_captured else None, launcher)
            for number in range(config.world_size)
        ]
        for rank in self.ranks:
            rank.load()
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]
        groups = loopback_groups(Topology(("here",) * len(self.ranks)))
        self.readies = self._together(lambda rank: self._connect(rank, groups))

    def _connect(self, rank: DeviceRank, groups: Sequence[Groups]) -> Ready:
        if len(self.ranks) == 1:
            return rank.join(Join(1, 0, "", 0, ("here",)))
        return rank.connect(groups[self.ranks.index(rank)])

    def start(self, plan: StepPlan) -> list[StepHandle]:
        return self._together(lambda rank: rank.start(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        result, *others = self._together(lambda rank: rank.execute(plan))
        assert result is not None
        assert not any(others)
        return result

    def _together(self, work: Callable[[DeviceRank], T]) -> list[T]:
        """The result of `work` on each rank, in rank order."""
        jobs = [thread.submit(work, rank) for thread, rank in zip(self._threads, self.ranks, strict=True)]
        return [job.result(timeout=240) for job in jobs]

    @property
    def num_works(self) -> int:
        """Parts of steps, on all ranks."""
        return sum(len(rank.fixed._works) for rank in self.ranks if rank.fixed)

    @property
    def num_captured(self) -> int:
        """Of which so many are replayed."""
        works = [work for rank in self.ranks if rank.fixed for work in rank.fixed._works.values()]
        return sum(isinstance(getattr(work, "__self__", None), OpRecorder) for work in works)

    @property
    def logits(self) -> torch.Tensor:
        """From which rank 0 chose last, of as many rows as the largest bucket has."""
        fixed = self.ranks[0].fixed
        assert fixed is not None
        assert fixed._sampler is not None
        return fixed._sampler.logits_RV

    def same_keys(self, other: "DeviceFleet") -> bool:
        """Whether all keys and values equal those of `other`, except unused ones."""
        pairs = zip(self.ranks, other.ranks, strict=True)
        return all(
            torch.equal(mine, theirs) for a, b in pairs for mine, theirs in zip(a.tensors(), b.tensors(), strict=True)
        )

"""Engines over a data folder, on ranks that are processes, and the stored state of their contexts."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from msgspec.structs import replace
from safetensors import safe_open

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from coordinator.persistence.open import PersistentState
from longleaf.config import DataConfig, EngineConfig
from longleaf.rank_protocol.step import Prefill, Restore, StepPlan
from tests.support.running import Running, running
from workers.__main__ import main


@dataclass
class DurableEngine:
    """An engine over a data folder, on ranks that are processes, and the plans that they have done."""

    engine: Engine
    durability: PersistentState
    folder: Path
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        """Tokens in chunks."""
        return sum(plan.num_tokens for plan in self.plans if isinstance(plan.work, Prefill))

    @property
    def num_restored(self) -> int:
        works = (plan.work for plan in self.plans if isinstance(plan.work, Restore))
        return sum(len(run) for work in works for run in work.runs)

    @property
    def segments(self) -> list[int]:
        return [segment.id for segment in self.engine.named("book").path.segments]

    async def save(self) -> None:
        await self.durability.snapshots.save(self.segments)

    async def rewrite(self) -> None:
        """Replaces all stored segments by the keys that ranks hold."""
        for segment in self.segments:
            await self.durability.snapshots.forget({segment: "to be rewritten"})
        remove(next(self.folder.rglob("segments")))
        await self.save()


@contextlib.asynccontextmanager
async def serving(data_dir: Path, config: EngineConfig) -> AsyncIterator[DurableEngine]:
    durability = await PersistentState.open(DataConfig(data_dir=str(data_dir), snapshots="demand"), config)
    config = replace(config, snapshot_url=durability.snapshot_url)
    fleet = LocalFleet(main)
    control = RankManager(config, await fleet.reserve(config))
    plans = list[StepPlan]()
    engine = Engine(control, config, 8192, observe=lambda plan, _: plans.append(plan), durability=durability)
    try:
        await fleet.launch(config, control.invitations, control.lost)
        async with running(engine) as found:
            assert isinstance(found, Running)
            yield DurableEngine(engine, durability, data_dir, plans)
    finally:
        await engine.close()
        await durability.close()
        await fleet.shutdown()


def stored_keys(data_dir: Path, block_size: int) -> dict[tuple[str, str, int], torch.Tensor]:
    """The blocks on storage, by segment, name and position."""
    found: dict[tuple[str, str, int], torch.Tensor] = {}
    for path in data_dir.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            ranges = [tuple(map(int, one.split("-"))) for one in file.metadata()["positions"].split()]
        starts = [start for low, high in ranges for start in range(low, high, block_size)]
        kind, segment = path.name.partition("-")[0], path.parent.parent.name.rpartition("-")[2]
        for name, tensor in safetensors.torch.load_file(path).items():
            assert len(tensor) == len(starts)
            found |= {(segment, f"{kind}.{name}", start): tensor[i] for i, start in enumerate(starts)}
    return found


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()

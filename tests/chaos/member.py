"""A rank with fault points that reports its block table and keys."""

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from longleaf.kernels.backend import Backend
from longleaf.rank_protocol.group_messages import Join, KvLayout, Ready
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.step import Decode, Prefill, Restore, StepPlan
from longleaf.runs import Run
from longleaf.storage.store import Store as Storage
from longleaf.storage.store import WriteResult
from tests.chaos.points import (
    ANSWER,
    BROADCAST,
    CHUNK,
    FETCH,
    JOINING,
    LAYOUT,
    MOVE,
    READ,
    RESTORE,
    SAVE,
    SAVED,
    STEP,
    TENSOR,
    Points,
    Probe,
)
from tests.chaos.reference import DEADLY, POISON
from workers.kv_cache.pools import sharded_layers
from workers.model.model import Model
from workers.model.weight_reader import WeightReader
from workers.rank import Rank
from workers.rank_runtime import StepHandle
from workers.runners import kv_transfer


class ChaosRank(Rank):
    """A rank with a probe in `folder`."""

    def __init__(self, folder: Path, spec: RankSpec) -> None:
        self._points = Points()
        super().__init__(spec, lambda url: ProbedStore(Storage.open(url), self._points))
        self._is_chunk = False
        kv_transfer.check_all_ranks = partial(self._commit_transfer, kv_transfer.check_all_ranks)
        self._watch_reads()
        Probe(folder, {"arm": self._points.arm, "book": self._block_table, "keys": self._keys}).start()

    def allocate_pool(self, model: Model, backend: Backend | None = None) -> None:
        super().allocate_pool(model, backend)
        layers: Any = model.decoder.layers
        layers[len(layers) // 2].register_forward_pre_hook(self._pass_half)

    def _watch_reads(self) -> None:
        read = WeightReader.read

        def watched(reader: WeightReader, descriptor: int, start: int, buffer: memoryview) -> None:
            self._points.reach(TENSOR)
            read(reader, descriptor, start, buffer)

        WeightReader.read = watched  # type: ignore[method-assign]

    def _pass_half(self, *_: object) -> None:
        if self._is_chunk:
            self._points.reach(CHUNK)

    def join(self, join: Join) -> Ready:
        self._points.reach(JOINING)
        self._number = join.rank
        ready = super().join(join)
        assert self.epoch is not None
        peers = self.epoch.peers
        # a strong reference would keep the epoch alive
        peers.broadcast = partial(self._broadcast, WeakMethod(peers.broadcast))
        return ready

    def _broadcast(self, broadcast: Any, ids_T: Tensor) -> Tensor:
        self._points.reach(BROADCAST)
        return broadcast()(ids_T)

    def _commit_transfer(self, commit: Any, *arguments: object) -> None:
        self._points.reach(MOVE)
        commit(*arguments)

    def hold(self, parts: Sequence[int]) -> int:
        self._points.reach(READ)
        return super().hold(parts)

    def set_layout(self, layout: KvLayout) -> None:
        self._points.reach(LAYOUT)
        super().set_layout(layout)

    def start(self, plan: StepPlan) -> StepHandle:
        self._points.reach(STEP)
        if isinstance(plan.work, Restore):
            self._points.reach(RESTORE)
        if has_poison(plan, POISON):
            raise RuntimeError("poison")
        if has_poison(plan, DEADLY) and self._number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_chunk = isinstance(plan.work, Prefill)
        pending = super().start(plan)

        def answer():
            result = pending.result()
            self._points.reach(ANSWER)
            return result

        return StepHandle(lambda: pending.is_done, answer)

    # --- its contents ---

    def _block_table(self) -> dict[int, tuple[int, dict[int, list[tuple[int, int, int]]]]]:
        """The start of each segment and the extents that each rank stores of it."""
        block_table: Any = self._session._block_table
        return {
            segment: (
                block_table._starts[segment],
                {rank: [tuple(e) for e in one.extents] for rank, one in resident.items()},
            )
            for segment, resident in block_table._slots.items()
        }

    @torch.inference_mode()
    def _keys(self, runs: Sequence[Run]) -> dict[int, Tensor]:
        """The keys and values of runs, concatenated, as [S, K, D + V] by layer. Only layers that are sharded over the
        ranks."""
        size = self.config.block_size
        slots = [run.blocks[i // size] * size + i % size for run in runs for i in range(len(run))]
        layers = sharded_layers(self.model, self.config)
        return {layer: self.pool.take(layer, torch.tensor(slots)).numpy() for layer in layers}


class ProbedStore:
    """A store with fault points."""

    def __init__(self, store: Storage, points: Points) -> None:
        self._store = store
        self._points = points

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> WriteResult:
        self._points.reach(SAVE)
        written = self._store.put(name, parts)
        self._points.reach(SAVED)
        return written

    def get(self, name: str, digest: str | None = None) -> bytes:
        self._points.reach(FETCH)
        return self._store.get(name, digest)


def ids_of(plan: StepPlan) -> list[tuple[int, ...]]:
    match plan.work:
        case Prefill() as work:
            return [work.token_ids]
        case Decode() as work:
            return [row.token_ids for row in work.rows]
        case _:
            return []


def has_poison(plan: StepPlan, poison: tuple[int, ...]) -> bool:
    size = len(poison)
    return any(ids[i : i + size] == poison for ids in ids_of(plan) for i in range(len(ids) - size + 1))

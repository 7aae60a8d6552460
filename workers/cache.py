"""One rank's pool of keys and values, and which runs of which segments lie in it.

The pool of a layer is [K, slots, D]: the slots of a head are neighbours, so blocks with neighbouring ids are one
stretch of memory that a kernel reads in one call, without a copy. Which blocks a run gets is decided by the
coordinator; this module only remembers.
"""

import bisect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longleaf.runs import Extent, Run, extents
from workers.model import LayerSpec


class Pool:
    """Keys and values of all layers. The slots of one more block, past the last, take what nobody needs (trash)."""

    def __init__(self, layers: dict[int, LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: str):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self.trash_slot = num_blocks * block_size
        num_slots = self.trash_slot + 1
        shapes = {i: (spec.num_kv_heads, num_slots, spec.head_dim) for i, spec in layers.items()}
        self.keys = {i: torch.empty(shape, dtype=dtype, device=device) for i, shape in shapes.items()}
        self.values = {i: torch.empty(shape, dtype=dtype, device=device) for i, shape in shapes.items()}

    def store(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """Writes the keys and values of T tokens into their slots."""
        self.keys[layer].index_copy_(1, slots_T, k_KTD)
        self.values[layer].index_copy_(1, slots_T, v_KTD)


class Held:
    """The part of one segment that one rank holds, in position order."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def put(self, run: Run) -> None:
        """Adds a run, or replaces the last one by its grown self."""
        if self.runs and self.runs[-1].start == run.start:
            self.runs[-1] = run
        else:
            self.runs.append(run)


class Segments:
    """Which runs of which segments lie here, and which on the other ranks: every plan tells of all.

    A path may use only the beginning of a segment: each part of a path ends where the next one starts.
    """

    def __init__(self, rank: int, block_size: int) -> None:
        self._rank = rank
        self._block_size = block_size
        self._held: dict[int, dict[int, Held]] = {}
        self._starts: dict[int, int] = {}

    def put(self, segment: int, runs: Sequence[Run]) -> None:
        """Notes the runs of a step. The first of them all tells where the segment starts."""
        self._starts.setdefault(segment, runs[0].start)
        held = self._held.setdefault(segment, {})
        for run in runs:
            held.setdefault(run.rank, Held()).put(run)

    def release(self, segments: Sequence[int]) -> None:
        """Forgets segments."""
        for segment in segments:
            self._held.pop(segment, None)
            self._starts.pop(segment, None)

    def extents(self, path: Sequence[int], start: int, end: int, rank: int | None = None) -> Iterator[Extent]:
        """What a rank, by default this one, holds of the positions [start, end) of a path, in position order."""
        holder = self._rank if rank is None else rank
        ends = [*(self._starts[segment] for segment in path[1:]), end]
        for segment, part_end in zip(path, ends, strict=True):
            runs = self._held.get(segment, {}).get(holder, Held()).runs
            yield from self._within(runs, start, min(part_end, end))

    def _within(self, runs: Sequence[Run], start: int, end: int) -> Iterator[Extent]:
        first = bisect.bisect_right(runs, start, key=lambda run: run.end)
        for run in runs[first:]:
            if run.start >= end:
                break
            for extent in extents(run, self._block_size):
                low, high = max(extent.start, start), min(extent.end, end)
                if low < high:
                    yield Extent(low, high, extent.slot + low - extent.start)

    def stretches(self, path: Sequence[int], end: int) -> list[tuple[int, int]]:
        """Slots [start, end) that hold the positions before `end`, neighbours joined: order and gaps in the
        positions do not matter to queries that see all of them."""
        joined: list[tuple[int, int]] = []
        for extent in self.extents(path, 0, end):
            low, high = extent.slot, extent.slot + extent.end - extent.start
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        return joined

"""One rank's pool of keys and values, and which runs of which segments lie in it.

The pool of a layer is [K, slots, D]: the slots of a head are neighbours, so blocks with neighbouring ids are one
stretch of memory that a kernel reads in one call, without a copy. Which blocks a run gets is decided by the
coordinator; this module only remembers.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.attention.kernels import Kernel
from longleaf.attention.masks import Read
from longleaf.geometry import EVERY_RANK
from longleaf.runs import Extent, Run, extents, join
from workers.model.model import LayerSpec


class Slots(Protocol):
    """Keys and values of all layers by slot, however they are kept: here, or in 8 bits in `workers.keys.quantized`."""

    block_size: int
    dtype: torch.dtype
    """Of what is stored and taken."""
    device: str
    trash_slot: int

    def bytes_per_slot(self, layer: int) -> int:
        """Of a token's keys and values in a layer."""
        ...

    def store(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of T tokens into their slots, and gives them as they are kept."""
        ...

    def take(self, layer: int, slots_L: Tensor) -> Tensor:
        """What is kept of some tokens, [L, N, K, D] with N tensors, for `split`."""
        ...

    def pack(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> Tensor:
        """The same, [T, N, K, D], of tokens that are not kept."""
        ...

    def split(self, layer: int, taken_SNKD: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [K, S, D] and values [K, S, V] of tokens that were taken or packed, here or elsewhere."""
        ...

    def attend(
        self, kernel: Kernel, layer: int, q_THD: Tensor, reads: Sequence[Read], scale: float, softcap: float | None
    ) -> Partial:
        """The partial of queries over what is kept in the slots of the reads."""
        ...


class Pool:
    """Keys and values as they were computed. The slots of one more block, past the last, take what nobody needs
    (trash).

    In latent attention the values of a layer are a view of its keys. Layers with a limited reach have
    `num_window_blocks` blocks and no trash, if that is given: their slots are then others than those of the rest.
    """

    def __init__(
        self,
        layers: dict[int, LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        num_window_blocks: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self.trash_slot = num_blocks * block_size
        num_slots = self.trash_slot + 1
        num_window_slots = num_slots if num_window_blocks is None else num_window_blocks * block_size
        self._layers = layers
        self._stored = {
            i: [
                torch.empty(spec.num_kv_heads, size, spec.head_dim, dtype=dtype, device=device)
                for _ in range(spec.num_tensors)
            ]
            for i, spec in layers.items()
            for size in [num_slots if spec.reach.is_full else num_window_slots]
        }
        self.keys = {i: stored[0] for i, stored in self._stored.items()}
        self.values = {i: stored[-1][..., : layers[i].value_dim] for i, stored in self._stored.items()}

    def bytes_per_slot(self, layer: int) -> int:
        """Of a token's keys and values in a layer."""
        return self._layers[layer].num_stored * self.dtype.itemsize

    def store(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of T tokens into their slots, and gives them; values that lie in the keys go with
        them."""
        for pool, tokens in zip(self._stored[layer], (k_KTD, v_KTV), strict=False):
            pool.index_copy_(1, slots_T, tokens)
        return k_KTD, v_KTV

    def take(self, layer: int, slots_L: Tensor) -> Tensor:
        """What is stored of some tokens, [L, N, K, D] with N tensors, for `split`."""
        return torch.stack([pool.index_select(1, slots_L).transpose(0, 1) for pool in self._stored[layer]], dim=1)

    def pack(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> Tensor:
        """The same, [T, N, K, D], of tokens that are not stored."""
        tensors = (k_KTD, v_KTV)[: self._layers[layer].num_tensors]
        return torch.stack([tokens.transpose(0, 1) for tokens in tensors], dim=1)

    def split(self, layer: int, taken_SNKD: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [K, S, D] and values [K, S, V] of tokens that were taken or packed, here or elsewhere."""
        k_KSD, v_KSD = (taken_SNKD[:, i].transpose(0, 1) for i in (0, -1))
        return k_KSD, v_KSD[..., : self._layers[layer].value_dim]

    def attend(
        self, kernel: Kernel, layer: int, q_THD: Tensor, reads: Sequence[Read], scale: float, softcap: float | None
    ) -> Partial:
        """The partial of queries over what is kept in the slots of the reads."""
        return kernel(q_THD, self.keys[layer], self.values[layer], reads, scale, softcap)


class Part(NamedTuple):
    """Positions [start, end) of a segment that a path uses."""

    segment: int
    start: int
    end: int


class Held:
    """The part of one segment that one rank holds, in position order."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []

    def put(self, run: Run, block_size: int) -> None:
        """Adds a run, or replaces the last one by its grown self."""
        while self.extents and self.extents[-1].start >= run.start:
            self.extents.pop()
        self.extents.extend(extents(run, block_size))

    def within(self, start: int, end: int) -> Iterator[Extent]:
        """What is held of the positions [start, end)."""
        first = bisect.bisect_right(self.extents, start, key=lambda extent: extent.end)
        for extent in self.extents[first:]:
            low, high = max(extent.start, start), min(extent.end, end)
            if low >= high:
                break
            yield Extent(low, high, extent.slot + low - extent.start)


class Segments:
    """Which runs of which segments lie here, and which on the other ranks: every plan tells of all.

    A path may use only the beginning of a segment: each part of a path ends where the next one starts. What lies on
    each rank itself is asked for as that of EVERY_RANK.
    """

    def __init__(self, rank: int, block_size: int) -> None:
        self._rank = rank
        self._block_size = block_size
        self._held: dict[int, dict[int, Held]] = {}
        self._starts: dict[int, int] = {}

    def put(self, segment: int, runs: Sequence[Run], window_runs: Sequence[Run] = ()) -> None:
        """Notes the runs of a step. The first of them all tells where the segment starts; those of windows replace
        what was noted of them before."""
        self._starts.setdefault(segment, runs[0].start)
        held = self._held.setdefault(segment, {})
        held.pop(EVERY_RANK, None)
        for run in (*runs, *window_runs):
            held.setdefault(run.rank, Held()).put(run, self._block_size)

    def release(self, segments: Sequence[int]) -> None:
        """Forgets segments."""
        for segment in segments:
            self._held.pop(segment, None)
            self._starts.pop(segment, None)

    def parts(self, path: Sequence[int], end: int) -> list[Part]:
        """What a path uses of its segments before the position `end`."""
        starts = [self._starts[segment] for segment in path]
        ends = [*(min(start, end) for start in starts[1:]), end]
        return [Part(*part) for part in zip(path, starts, ends, strict=True) if part[1] < part[2]]

    def held(self, segment: int, start: int, end: int, rank: int | None = None) -> Iterator[Extent]:
        """What a rank, by default this one, holds of the positions [start, end) of a segment, in position order."""
        held = self._held[segment].get(self._rank if rank is None else rank)
        return held.within(start, end) if held else iter(())

    def extents(self, path: Sequence[int], start: int, end: int, rank: int | None = None) -> Iterator[Extent]:
        """The same of a path."""
        for part in self.parts(path, end):
            yield from self.held(part.segment, max(part.start, start), part.end, rank)


def slots_of(extents: Iterable[Extent]) -> list[int]:
    """Each slot of extents."""
    return [slot for extent in extents for slot in range(extent.slot, extent.slot + extent.end - extent.start)]


def stretches(extents: Iterable[Extent]) -> list[tuple[int, int]]:
    """Slots [start, end) of extents, neighbours joined: order and gaps in the positions do not matter to queries that
    see all of them."""
    return join((extent.slot, extent.slot + extent.end - extent.start) for extent in extents)

"""Drafts that are refused: how what a rank was told of them, and what it kept, is undone.

The keys of a refused draft stay in its slots, where the next tokens overwrite them, and the ledger ends before them. In
8 bits that is not enough: a draft may have raised an exponent of its block, by which all other keys there were rounded
anew. Then the block is put back as it was, and the keys that were accepted are stored again. What a block holds depends
on the tokens in it alone, so it is what steps of one token would have left.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longleaf.kernels.backend import Backend
from longleaf.rank_protocol.step import Row
from workers.host_copies import to_device
from workers.kv_cache.quantized import QuantizedPool


class Drafted(NamedTuple):
    """A sequence with drafts, and the rows of the step that are its tokens."""

    row: Row
    rows: range


def drafted_among(sampled: Sequence[Row], sample_rows: Sequence[int]) -> list[Drafted]:
    """The sequences with drafts, of those that are sampled; `sample_rows` are of all of these."""
    ends = accumulate(1 + len(row.draft_ids) for row in sampled)
    lasts = [sample_rows[end - 1] + 1 for end in ends]
    return [
        Drafted(row, range(last - row.num_tokens, last))
        for row, last in zip(sampled, lasts, strict=True)
        if row.draft_ids
    ]


class StoredKv(NamedTuple):
    """What a step of T rows stores in a layer."""

    slots_T: Tensor
    k_KTD: Tensor
    v_KTV: Tensor


class StoredKvRecorder(Protocol):
    """Who keeps what a step stores until its drafts are accepted or not."""

    def note(self, layer: int, stored: StoredKv) -> None:
        """Of each layer once in a step."""
        ...


class SavedBlocks(NamedTuple):
    """Blocks of one kind as they were before a step."""

    owners: Sequence[int]
    """The sequence of each block."""
    blocks: Sequence[int]
    kept: Sequence[tuple[Tensor, Tensor]]
    """Each part of the pool [K, B, ...], and what was in those blocks."""


class DraftedBlocks:
    """The blocks of a pool of 8 bits into which drafts come, as they were, and what a step stores.

    Implements Keeper."""

    def __init__(
        self,
        pool: QuantizedPool,
        backend: Backend,
        drafted: Sequence[Drafted],
        slots: Sequence[int],
        window_slots: Sequence[int],
    ) -> None:
        """The slots are those of all rows of the step; those of windows are empty where there are none."""
        self._pool = pool
        self._backend = backend
        self._drafted = drafted
        self.stored: dict[int, StoredKv] = {}
        """By layer."""
        self._saved = [
            self._save(slots, pool.trash_slot, of_windows=False),
            self._save(window_slots, pool.window_trash_slot, of_windows=True),
        ]

    def _save(self, slots: Sequence[int], trash_slot: int, *, of_windows: bool) -> SavedBlocks:
        found = sorted(self._blocks(slots, trash_slot)) if slots else []
        owners, blocks = [owner for owner, _ in found], [block for _, block in found]
        parts = [part.tensor for part in self._pool.blocks(of_windows=of_windows)] if blocks else []
        there = self._there(blocks)
        return SavedBlocks(owners, blocks, [(part, part[:, there]) for part in parts])

    def _blocks(self, slots: Sequence[int], trash_slot: int) -> set[tuple[int, int]]:
        """Sequences and the blocks that they write to."""
        size = self._pool.block_size
        return {(row.sequence, slots[i] // size) for row, rows in self._drafted for i in rows if slots[i] != trash_slot}

    def note(self, layer: int, stored: StoredKv) -> None:
        """See `StoredKvRecorder`."""
        self.stored[layer] = stored

    def put_back(self, num_left: Mapping[int, int]) -> None:
        """Has the blocks of sequences be as if no more than so many of their tokens had been stored."""
        for owners, blocks, retained in self._saved:
            places = [place for place, owner in enumerate(owners) if owner in num_left]
            to, source = self._there([blocks[place] for place in places]), self._there(places)
            for part, before in retained if places else ():
                part[:, to] = before[:, source]
        rows_L = self._there([*self._left(num_left)])
        for layer, (slots_T, k_KTD, v_KTV) in self.stored.items() if len(rows_L) else ():
            self._pool.store(self._backend, layer, slots_T[rows_L], k_KTD[:, rows_L], v_KTV[:, rows_L])

    def _left(self, num_left: Mapping[int, int]) -> Iterator[int]:
        for row, rows in self._drafted:
            yield from rows[: num_left.get(row.sequence, 0)]

    def _there(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.long), self._pool.device)

"""Rolls back refused drafts.

The keys of a refused draft stay in its slots, where the next tokens overwrite them, and the block table ends before
them. With 8-bit keys that is not enough: a draft may have raised an exponent of its block, so that all other keys there
were rounded again. Then the block is restored and the accepted keys are stored again. The content of a block depends
only on the tokens in it, so the result is that of steps of one token each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longleaf.kernels.backend import Backend
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Row
from workers.host_copies import numbers_on
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.slots import KvPool
from workers.step.inputs import RowNumbers


class Drafted(NamedTuple):
    """A sequence with drafts, and the rows of the step that are its tokens."""

    row: Row
    rows: range


def drafted_among(sampled: Sequence[Row], sample_rows: Sequence[int]) -> list[Drafted]:
    """The sequences with drafts among the sampled ones; `sample_rows` are the rows of all sampled sequences."""
    ends = accumulate(1 + len(row.draft_ids) for row in sampled)
    lasts = [sample_rows[end - 1] + 1 for end in ends]
    return [
        Drafted(row, range(last - row.num_tokens, last))
        for row, last in zip(sampled, lasts, strict=True)
        if row.draft_ids
    ]


class StoredKv(NamedTuple):
    """The keys and values that a step of T rows stores in a layer."""

    slots_T: Tensor
    k_KTD: Tensor
    v_KTV: Tensor


class StoredKvRecorder(Protocol):
    """Records the stored keys and values of a step until its drafts are accepted or refused."""

    def record(self, layer: int, stored: StoredKv) -> None:
        """Called once per layer of a step."""
        ...


class FixedTokens:
    """Keeps the keys and values that a captured step stores until the next step. The first recorded step has the most
    rows.

    Implements StoredKvRecorder.
    """

    def __init__(self) -> None:
        self._there: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, [K, T, D] and [K, T, V]."""
        self._stored: dict[int, dict[int, StoredKv]] = {}
        """By the rows of a bucket, then by layer."""

    def record(self, layer: int, stored: StoredKv) -> None:
        """See `StoredKvRecorder`. Steps with the same number of rows read their slots from the same address."""
        slots_T, *parts = stored
        if layer not in self._there:
            k, v = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts)
            self._there[layer] = k, v
        k_KTD, v_KTV = (part[:, : len(slots_T)] for part in self._there[layer])
        for there, part in zip((k_KTD, v_KTV), parts, strict=True):
            there.copy_(part)
        self._stored.setdefault(len(slots_T), {})[layer] = StoredKv(slots_T, k_KTD, v_KTV)

    def stored_by_layer(self, num_rows: int) -> dict[int, StoredKv]:
        """The keys and values that the last step of a bucket with this many rows stored, by layer."""
        return self._stored[num_rows]


class SavedBlocks(NamedTuple):
    """Blocks of one kind as they were before a step."""

    owners: Sequence[int]
    """The sequence of each block."""
    blocks: Sequence[int]
    layers: Sequence[tuple[Tensor, Tensor]]
    """Each part of the pool [K, B, ...], and the previous content of the blocks."""


class DraftedBlocks:
    """The blocks of an 8-bit pool that drafts are written to, with their previous content, and the keys and values that
    a step stores.

    Implements StoredKvRecorder.
    """

    def __init__(
        self,
        pool: QuantizedPool,
        backend: Backend,
        drafted: Sequence[Drafted],
        slots: Sequence[int],
        window_slots: Sequence[int],
    ) -> None:
        """The slots are those of all rows of the step; `window_slots` is empty where there are none."""
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
        there = numbers_on(self._pool.device, blocks)
        return SavedBlocks(owners, blocks, [(part, part[:, there]) for part in parts])

    def _blocks(self, slots: Sequence[int], trash_slot: int) -> set[tuple[int, int]]:
        """Sequences and the blocks that they write to."""
        size = self._pool.block_size
        return {(row.sequence, slots[i] // size) for row, rows in self._drafted for i in rows if slots[i] != trash_slot}

    def record(self, layer: int, stored: StoredKv) -> None:
        """See `StoredKvRecorder`."""
        self.stored[layer] = stored

    def restore(self, num_left: Mapping[int, int]) -> None:
        """Restores the blocks of sequences, then stores the first `num_left[sequence]` of their tokens again."""
        for owners, blocks, retained in self._saved:
            places = [place for place, owner in enumerate(owners) if owner in num_left]
            source = numbers_on(self._pool.device, places)
            to = numbers_on(self._pool.device, [blocks[place] for place in places])
            for part, before in retained if places else ():
                part[:, to] = before[:, source]
        rows_L = numbers_on(self._pool.device, [*self._left(num_left)])
        for layer, (slots_T, k_KTD, v_KTV) in self.stored.items() if len(rows_L) else ():
            self._pool.store(self._backend, layer, slots_T[rows_L], k_KTD[:, rows_L], v_KTV[:, rows_L])

    def _left(self, num_left: Mapping[int, int]) -> Iterator[int]:
        for row, rows in self._drafted:
            yield from rows[: num_left.get(row.sequence, 0)]


class DraftRollback:
    """Drops the keys behind the accepted drafts of the rows of an epoch."""

    def __init__(self, block_table: BlockTable, sequences: RowState, pool: KvPool, backend: Backend) -> None:
        self._block_table = block_table
        self._sequences = sequences
        self._pool = pool
        self._backend = backend

    def save_blocks(self, rows: RowNumbers, sampled: Sequence[Row]) -> DraftedBlocks | None:
        """Saves the blocks to roll back when drafts are refused; None where a refused draft leaves only its keys."""
        if not isinstance(self._pool, QuantizedPool):
            return None
        drafted = drafted_among(sampled, rows.sample_rows)
        return DraftedBlocks(self._pool, self._backend, drafted, rows.slots, rows.window_slots)

    def cut_back(self, rows: Sequence[Row], ids: Iterable[Sequence[object]], blocks: DraftedBlocks | None) -> None:
        """Drops the keys behind the accepted drafts of rows, given the ids or tokens of each row."""
        num_left = dict[int, int]()
        for row, found in zip(rows, ids, strict=True):
            num_accepted = max(0, len(found) - 1)
            if num_accepted < len(row.draft_ids):
                num_left[row.sequence] = row.num_known + num_accepted
                end = row.start + row.num_known + num_accepted
                self._block_table.cut_back(row.path[-1], end)
                self._sequences.cut_back(row.sequence, end)
        if blocks is not None and num_left:
            blocks.restore(num_left)

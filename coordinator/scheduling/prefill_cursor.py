"""The tokens that a job processes, and the segment that grows with them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.kv_cache.block_placer import BlockPlacer, Reservation
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.runs import Run


@dataclass(slots=True)
class PrefillCursor:
    """Tokens to process after a path of sealed segments. The first `num_prefill` of them are processed in chunks.

    `num_placed` counts the tokens that plans have placed, `num_computed` those whose keys and values exist; the
    difference is under way. The path may contain the first of the tokens already; these count as placed and read."""

    path: TokenPath
    token_ids: "array[int]"
    num_prefill: int
    num_placed: int = 0
    num_computed: int = 0

    @property
    def has_chunks(self) -> bool:
        """There are prompt tokens that no plan has placed yet."""
        return self.num_placed < self.num_prefill

    @property
    def is_over(self) -> bool:
        """All chunks are processed."""
        return self.num_computed >= self.num_prefill

    @property
    def num_unplaced(self) -> int:
        """Number of tokens that no plan has placed yet."""
        return len(self.token_ids) - self.num_placed

    def roll_back(self) -> bool:
        """Reverts the placement by plans under way. Returns whether there was any."""
        had_placed, self.num_placed = self.num_placed > self.num_computed, self.num_computed
        return had_placed

    def next_chunk(self, size: int) -> tuple[int, ...]:
        """The ids of the next chunk, which count as placed from now on."""
        start = self.num_placed
        self.num_placed = min(start + size, self.num_prefill)
        return tuple(self.token_ids[start : self.num_placed])


class GrowingSegment:
    """The segment into which a running job processes and generates tokens, and the blocks reserved for it."""

    def __init__(self, placement: SegmentPlacement, reservation: Reservation) -> None:
        self.placement = placement
        self.reservation = reservation
        self.is_ready = True
        """Nothing of the path is lost, and blocks for the remaining tokens are reserved. False only after a loss of
        ranks."""
        self.path_ids = placement.segment.path.ids
        """The path to the end of the segment, as sent to the ranks."""
        self._has_states = False
        """The window runs are of recurrent states."""
        self._num_draft_states = 0
        """Number of drafts under way that have slots for recurrent states."""
        self._num_chunks = 0

    @property
    def segment(self) -> Segment:
        return self.placement.segment

    def add_chunk(self, token_ids: Sequence[int], placer: BlockPlacer) -> tuple[Run, ...]:
        """Places a chunk, in pieces for the ranks."""
        start, end = self.segment.end, self.segment.end + len(token_ids)
        pieces = placer.place_chunk(start, end, self._num_chunks, self.reservation)
        self._extend(token_ids, pieces, placer, is_chunk=True)
        self._num_chunks += 1
        return pieces

    def add_rows(self, token_ids: Sequence[int], placer: BlockPlacer) -> tuple[Run, ...]:
        """Places tokens that are computed as rows of a decode step."""
        last = self.placement.runs[-1] if self.placement.runs else None
        runs = placer.grow(last, self.segment.end, len(token_ids), self.reservation)
        self._extend(token_ids, runs, placer, is_chunk=False)
        return runs

    def num_spare(self, block_size: int) -> int:
        """Number of tokens that fit into the last blocks without a new block, in sharded and window runs. Recurrent
        states are in blocks of one position, and do not count."""
        window_runs = () if self._has_states else self.placement.window_runs
        runs = [each[-1] for each in (self.placement.runs, window_runs) if each]
        return min(len(run.blocks) * block_size - len(run) for run in runs)

    def window_runs_with_drafts(self, window_runs: tuple[Run, ...], count: int, placer: BlockPlacer) -> tuple[Run, ...]:
        """The window runs of the last row with `count` drafts. Each draft has a slot for the recurrent state after it,
        so that the state before a refused draft is not lost."""
        if placer.num_draft_states is None:
            return lengthened(window_runs, count)
        placement = self.placement
        placement.window_runs = placer.add_draft_states(placement.window_runs, count, self.reservation)
        self._num_draft_states = count
        [run], blocks = window_runs, placement.window_runs[-1].blocks[-count:]
        return (replace(run, end=run.end + count, blocks=(*run.blocks, *blocks)),)

    def accept(self, token_ids: Sequence[int], placer: BlockPlacer) -> None:
        """Adds accepted drafts, whose keys are in the last block already. Drops the states of refused ones."""
        placement, count = self.placement, len(token_ids)
        if count:
            placement.extend(token_ids, lengthened(placement.runs[-1:], count))
        if self._num_draft_states:
            runs, end = placement.window_runs, self.segment.end
            placement.window_runs = placer.drop_draft_states(runs, end, self._num_draft_states, self.reservation)
            self._num_draft_states = 0
        elif count:
            placement.window_runs = lengthened(placement.window_runs, count)

    def roll_back(self, end: int, placer: BlockPlacer) -> None:
        """Removes the chunk that begins at position `end`; its blocks return to the reservation."""
        placement = self.placement
        placer.return_unwritten(placement.cut(end), self.reservation)
        placement.window_runs = placer.roll_back(placement.window_runs, end, self.reservation)
        self.segment.cut(end)
        self._num_chunks -= 1

    def _extend(self, token_ids: Sequence[int], runs: tuple[Run, ...], placer: BlockPlacer, *, is_chunk: bool) -> None:
        placement, start = self.placement, self.segment.end
        end = start + len(token_ids)
        self._has_states = placer.windows is not None and placer.windows.is_state
        placement.window_runs = placer.advance_windows(
            placement.window_runs, start, end, self.reservation, is_chunk=is_chunk
        )
        placement.extend(token_ids, runs)


def lengthened(runs: Sequence[Run], count: int) -> tuple[Run, ...]:
    """The runs with `count` more tokens in the last one, which has space for them."""
    return (*runs[:-1], replace(runs[-1], end=runs[-1].end + count)) if runs else ()

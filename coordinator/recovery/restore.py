"""Restore of lost keys from storage: which rank fetches which piece, and the blocks that the pieces go to. Pure.

Objects are fetched in parallel with the steps; a later step copies them into blocks. Pieces that cannot be fetched stay
lost and are recomputed. Where windows are replicated, a segment is restored completely in one step or not at all,
because recomputation cannot begin in the middle of a segment.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges, Range
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Restore, RestorePortion
from longleaf.runs import Run, ceil_div

MAX_FETCHED = 4
"""Maximum number of pieces per rank that are being fetched, or fetched and not yet copied into blocks."""
OF_WINDOWS = -1
"""The piece index of the window piece."""


def none_stored(segment: int) -> bool:
    """The default for `is_stored`: no segment is in storage."""
    del segment
    return False


@dataclass(slots=True, eq=False)
class RestoreChunk:
    """The blocks of a piece that one rank restores, or the window piece, which all ranks restore."""

    ticket: int
    rank: int
    """EVERY_RANK for all ranks."""
    segment: int
    piece: int
    """Its index among the pieces of the segment, or OF_WINDOWS."""
    runs: tuple[Run, ...] = ()
    is_there: bool = False
    """It has been fetched."""


@dataclass(slots=True, eq=False)
class _SegmentRestore:
    """A segment that is being restored."""

    placement: SegmentPlacement
    loss: LostRanges
    left: list[tuple[int, list[Range]]] | None = None
    """Pieces and their ranges that are not ordered yet; None until storage has listed the pieces."""
    windows: tuple[Range, ...] = ()
    """The ranges of the window piece."""
    parts: dict[int, RestoreChunk] = field(default_factory=dict[int, RestoreChunk])
    """Chunks that are ordered but not yet in blocks, by ticket."""

    @property
    def is_stale(self) -> bool:
        """Nothing needs the segment any more, or it was evicted and reloaded since."""
        return self.placement.loss is not self.loss


class RestorePlanner:
    """Plans restores, one plan at a time, of segments with reserved blocks.

    The fetcher polls `pop_wanted`, `pop_ordered` and `pop_discarded`, and reports results with `set_pieces`,
    `mark_unavailable` and `on_fetched`."""

    def __init__(
        self, placer: BlockPlacer, segments: SegmentStore, is_stored: Callable[[int], bool] = none_stored
    ) -> None:
        """`is_stored` returns whether storage has a segment in a format that these ranks can load."""
        self._placer = placer
        self._placements = segments.placements
        self._segments = segments
        self._is_stored = is_stored
        self._returns: dict[int, _SegmentRestore] = {}
        self._next_ticket = 0
        self._under_way: tuple[_SegmentRestore, list[RestoreChunk]] | None = None
        self._wanted: list[Segment] = []
        self._ordered: list[RestoreChunk] = []
        self._discarded: list[int] = []
        self._faults: list[Exception] = []
        self._broken: list[int] = []

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def under_way(self) -> Segment | None:
        """The segment that the plan under way restores."""
        return self._under_way[0].placement.segment if self._under_way else None

    def pop_faults(self) -> list[Exception]:
        """Removes and returns unexpected errors, for the log. The affected segments are recomputed."""
        faults, self._faults = self._faults, []
        return faults

    def has(self, placement: SegmentPlacement) -> bool:
        """Whether a segment is being restored. It must not be recomputed until that has ended."""
        found = self._returns.get(placement.segment.id)
        return found is not None and not found.is_stale

    def needs(self, segment: int) -> bool:
        """Whether a fetch for a segment may still be needed."""
        return segment in self._returns

    # --- interface of the fetcher ---

    def pop_wanted(self) -> list[Segment]:
        """Removes and returns the segments that the fetcher must look up in storage, and answer with `set_pieces` or
        `mark_unavailable`."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def pop_ordered(self) -> list[RestoreChunk]:
        """Removes and returns the chunks to fetch. The fetcher reports each result with `on_fetched`."""
        ordered, self._ordered = self._ordered, []
        return ordered

    def pop_discarded(self) -> list[int]:
        """Removes and returns the tickets that are no longer needed."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def pop_broken(self) -> list[int]:
        """Removes and returns the segments whose restore broke an epoch."""
        broken, self._broken = self._broken, []
        return broken

    def set_pieces(self, segment: int, pieces: Sequence[Sequence[Range]], windows: Sequence[Range]) -> None:
        """Takes the positions of each piece of a segment and of its window piece. Pieces that begin or end within a
        block are not used: recomputing the adjacent tokens would take more blocks than are reserved."""
        if (one := self._returns.get(segment)) is None or one.left is not None:
            return
        one.windows, one.left = tuple(windows), []
        for index, ranges in enumerate(pieces):
            common = _common(ranges, one.loss.left)
            if common and all(self._is_whole(one, low, high) for low, high in (*ranges, *common)):
                one.left.append((index, common))
        if self._placer.windows is not None and not self._is_covered(one):
            one.left = []
        self._commit(one)

    def _is_whole(self, one: _SegmentRestore, low: int, high: int) -> bool:
        """Whether positions [low, high) are whole blocks of a segment; the last block of the segment may be partial."""
        segment, size = one.placement.segment, self._placer.block_size
        return (low - segment.start) % size == 0 and (high == segment.end or (high - segment.start) % size == 0)

    def mark_unavailable(self, segment: int) -> None:
        """Storage has no more usable pieces of a segment: the rest is recomputed."""
        if (one := self._returns.get(segment)) is None:
            return
        planned = self._under_way[1] if self._is_planned(one) and self._under_way else []
        one.left = []
        for part in [part for part in one.parts.values() if part not in planned]:
            self._drop(one, part)
        self._commit(one)

    def on_fetched(self, ticket: int, *, is_there: bool) -> None:
        """Reports that a chunk has been fetched, or cannot be. Does nothing if the chunk is no longer needed."""
        one = next((one for one in self._returns.values() if ticket in one.parts), None)
        if one is None:
            return
        part = one.parts[ticket]
        if is_there:
            part.is_there = True
        elif self._placer.windows is not None:
            self.mark_unavailable(part.segment)
        else:
            assert one.left is not None
            one.left = [(index, ranges) for index, ranges in one.left if index != part.piece]
            self._drop(one, part)
            self._commit(one)

    # --- fetch orders ---

    def resume(self, paths: Iterable[TokenPath]) -> None:
        """Orders the fetches that are possible now, first those that `paths` need."""
        for one in [one for one in self._returns.values() if one.is_stale and not self._is_planned(one)]:
            self._forget(one)
        needed = self._placements.for_segments(segment for path in paths for segment in path.segments)
        for placement in dict.fromkeys([*needed, *self._placements.with_losses]):
            if (one := self._returns.get(placement.segment.id)) is None:
                one = self._begin(placement)
            if one is not None and one.left:
                try:
                    self._order(one)
                except Exception as error:
                    self._give_up(one, error)

    def _begin(self, placement: SegmentPlacement) -> _SegmentRestore | None:
        segment, loss = placement.segment, placement.loss
        if loss is None or loss.reservation is None or not loss.may_return or not self._is_stored(segment.id):
            return None
        if placement.incoming:  # it is being recomputed
            return None
        if self._placer.windows is not None and (loss.left != [(segment.start, segment.end)] or placement.window_runs):
            return None
        one = self._returns[segment.id] = _SegmentRestore(placement, loss)
        self._wanted.append(segment)
        return one

    def _order(self, one: _SegmentRestore) -> None:
        """Distributes the remaining pieces over the ranks, those with the most free blocks first. No rank gets more
        than its share at once."""
        placer, reservation = self._placer, one.loss.reservation
        assert reservation is not None
        is_whole = placer.windows is not None
        share = ceil_div(one.loss.num_blocks(placer.block_size).sharded, len(placer.pools))
        while one.left and (rank := self._next_rank(is_whole=is_whole)) is not None:
            index, ranges = one.left.pop(0)
            runs, rest = placer.place_restored(rank, ranges, share, reservation)
            if rest:
                one.left.insert(0, (index, rest))
            one.placement.incoming += runs
            self._add(one, rank, index, runs)
        if is_whole and not one.left and self._window_ranges(one):
            self._add(one, EVERY_RANK, OF_WINDOWS, ())

    def _next_rank(self, *, is_whole: bool) -> int | None:
        """The rank with the most free blocks among those that may fetch more."""
        counts = [0] * len(self._placer.pools)
        for part in (part for one in self._returns.values() for part in one.parts.values()):
            if part.rank != EVERY_RANK:
                counts[part.rank] += 1
        pools = self._placer.pools
        found = [rank for rank, n in enumerate(counts) if pools[rank].num_free and (is_whole or n < MAX_FETCHED)]
        return max(found, key=lambda rank: pools[rank].num_free, default=None)

    def _add(self, one: _SegmentRestore, rank: int, piece: int, runs: tuple[Run, ...]) -> None:
        part = RestoreChunk(self._next_ticket, rank, one.placement.segment.id, piece, runs)
        self._next_ticket += 1
        one.parts[part.ticket] = part
        self._ordered.append(part)

    # --- plans ---

    def plan(self) -> Restore | None:
        """Copies fetched chunks of one segment into blocks: at most one per rank, or with windows all of them; None
        when nothing can be done now."""
        for one in list(self._returns.values()):
            if not one.is_stale and (parts := self._ready(one)):
                try:
                    return self._plan(one, parts)
                except Exception as error:
                    self._give_up(one, error)
        return None

    def _give_up(self, one: _SegmentRestore, error: Exception) -> None:
        """Abandons the restore of a segment after an unexpected error."""
        self._faults.append(error)
        self.mark_unavailable(one.placement.segment.id)

    def _ready(self, one: _SegmentRestore) -> list[RestoreChunk]:
        there = [part for part in one.parts.values() if part.is_there]
        if self._placer.windows is not None:
            return there if not one.left and len(there) == len(one.parts) else []
        return list({part.rank: part for part in reversed(there)}.values())

    def _plan(self, one: _SegmentRestore, parts: list[RestoreChunk]) -> Restore:
        placement = one.placement
        portions = tuple(RestorePortion(part.ticket, part.runs) for part in parts if part.runs)
        windows = next((part for part in parts if part.piece == OF_WINDOWS), None)
        if windows is not None:
            assert one.loss.reservation is not None
            placement.window_runs = self._placer.place_windows(self._window_ranges(one), one.loss.reservation)
        placement.is_reported, self._under_way = True, (one, parts)
        if windows is None:
            return Restore(placement.segment.id, placement.segment.start, portions)
        return Restore(placement.segment.id, placement.segment.start, portions, placement.window_runs, windows.ticket)

    def _window_ranges(self, one: _SegmentRestore) -> list[Range]:
        """The window ranges to restore: whole blocks of the window piece, starting with the block that contains the
        first visible position."""
        size, found = self._placer.block_size, list[Range]()
        for low, high in one.windows:
            first = low + max(0, one.loss.windows_from - low) // size * size
            if first < high:
                found.append((first, high))
        return found

    def _is_covered(self, one: _SegmentRestore) -> bool:
        """Whether the pieces cover all lost ranges of a segment, the window piece covers all visible windows, and the
        reservation has enough blocks."""
        loss, reservation, end = one.loss, one.loss.reservation, one.placement.segment.end
        assert one.left is not None
        assert reservation is not None
        ranges = self._window_ranges(one)
        seen = _common(ranges, [(min(end, loss.windows_from), end)])
        num_blocks = sum(ceil_div(high - low, self._placer.block_size) for low, high in ranges)
        is_whole = sum(high - low for _, found in one.left for low, high in found) == loss.num_tokens
        is_seen = sum(high - low for low, high in seen) == end - min(end, loss.windows_from)
        return is_whole and is_seen and num_blocks <= reservation.left.windows

    def commit(self) -> SegmentPlacement | None:
        """The plan under way is complete. Returns the restored segment, or None if nothing needs it any more."""
        assert self._under_way is not None
        (one, parts), self._under_way = self._under_way, None
        if one.is_stale:
            self._forget(one)
            return None
        placement, loss = one.placement, one.loss
        for part in parts:
            placement.incoming = _without(placement.incoming, part.runs)
            placement.put(part.runs)
            for run in part.runs:
                loss.fill(run.start, run.end)
            del one.parts[part.ticket]
            self._discarded.append(part.ticket)
        if not loss.left:
            self._segments.drop_frontier(placement)
            self._segments.end_loss(placement)
            del self._returns[placement.segment.id]
        else:
            self._commit(one)
        return placement

    def undo(self, *, has_broken: bool) -> None:
        """Cancels all restores at the end of an epoch. A segment whose restore broke the epoch is recomputed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            one, _ = under_way
            one.loss.may_return &= not has_broken
            self._broken += [one.placement.segment.id] if has_broken else []
            if not one.is_stale:
                assert one.loss.reservation is not None
                one.placement.window_runs = self._placer.roll_back(
                    one.placement.window_runs, one.loss.first, one.loss.reservation
                )
        for one in list(self._returns.values()):
            self._forget(one)
        self._ordered.clear()
        self._wanted.clear()

    # --- end of a restore ---

    def _is_planned(self, one: _SegmentRestore) -> bool:
        """The plan under way uses fetched chunks of this segment."""
        return self._under_way is not None and self._under_way[0] is one

    def _commit(self, one: _SegmentRestore) -> None:
        """Ends a restore that has no more chunks; the tokens that are still lost are recomputed."""
        if one.left == [] and not one.parts and not one.is_stale:
            one.loss.may_return = False
            self._forget(one)

    def _forget(self, one: _SegmentRestore) -> None:
        for part in list(one.parts.values()):
            self._drop(one, part)
        del self._returns[one.placement.segment.id]

    def _drop(self, one: _SegmentRestore, part: RestoreChunk) -> None:
        del one.parts[part.ticket]
        self._discarded.append(part.ticket)
        if not one.is_stale:  # otherwise the blocks are free already
            assert one.loss.reservation is not None
            one.placement.incoming = _without(one.placement.incoming, part.runs)
            self._placer.return_unwritten(part.runs, one.loss.reservation)


def _without(runs: Sequence[Run], taken: Sequence[Run]) -> tuple[Run, ...]:
    ids = set(map(id, taken))
    return tuple(run for run in runs if id(run) not in ids)


def _common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """The intersection of two ascending lists of ranges."""
    return list(_meet(iter(ranges), iter(others)))


def _meet(ranges: Iterator[Range], others: Iterator[Range]) -> Iterator[Range]:
    one, other = next(ranges, None), next(others, None)
    while one is not None and other is not None:
        low, high = max(one[0], other[0]), min(one[1], other[1])
        if low < high:
            yield low, high
        if one[1] < other[1]:
            one = next(ranges, None)
        else:
            other = next(others, None)

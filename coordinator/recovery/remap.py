"""Remapping of placements to the ranks of the next epoch. Pure.

A run on a removed rank is lost. Where every rank holds the last keys of windowed layers, the windows in the middle of a
segment are not held. Tokens can then be recomputed only from a position whose visible windows are held, and from there
to the end.
"""

from bisect import bisect_right
from collections.abc import Iterable

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges, Range
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.runs import ceil_div


def remap(placer: BlockPlacer, segments: SegmentStore, ranking: RankMapping, *, has_windows: bool) -> None:
    """Moves the placements to the ranks of the next epoch. Nothing may be reserved or under way.

    Without `has_windows`, no rank holds windows any more that it could send to others.
    """
    after, holdings = ranking.after, segments.holdings
    gone = frozenset(range(len(placer.pools))) - after.keys()
    is_rolled = placer.windows is not None and (bool(gone) or not has_windows)
    segments.drop_cached(lambda path: is_rolled or _is_on(segments, path, gone))
    placer.change_ranks(ranking)
    found = [(holding, holding.change_ranks(after)) for holding in holdings]
    lost = {holding: ranges for holding, ranges in found if ranges}
    if is_rolled:
        _Rolled(placer, segments).lose(lost, has_windows=has_windows)
    else:
        for holding, ranges in lost.items():
            if holding.loss is None or holding.loss.left != ranges:
                _begin(segments, holding, ranges)


def _is_on(segments: SegmentStore, path: TokenPath, gone: frozenset[int]) -> bool:
    """Whether any part of a path was on a removed rank."""
    return any(
        run.rank in gone and run.start < end
        for segment, _, end in path.parts()
        for run in segments.holdings[segment].runs
    )


def _begin(segments: SegmentStore, holding: SegmentPlacement, ranges: list[Range]) -> LostRanges:
    front = holding.loss.front if holding.loss else None
    loss = LostRanges(ranges, holding.loss)
    loss.front = front  # until the new front is held
    if holding.loss:
        holding.loss.front = None
    segments.begin_loss(holding, loss)
    return loss


class _Rolled:
    """Marks tokens as lost where windows are replicated."""

    def __init__(self, placer: BlockPlacer, segments: SegmentStore) -> None:
        assert placer.windows is not None
        self._placer = placer
        self._windows = placer.windows
        self._segments = segments
        self._holdings = segments.holdings
        self._lost: dict[SegmentPlacement, list[Range]] = {}

    def lose(self, lost: dict[SegmentPlacement, list[Range]], *, has_windows: bool) -> None:
        first = {holding: ranges[0][0] for holding, ranges in lost.items()}
        self._lost = lost
        if not has_windows:
            for holding in (one for one in self._holdings if not one.is_evicted):
                holding.window_runs = self._placer.roll_back(holding.window_runs, 0, None)
                if (place := self._first_seen(holding)) < holding.segment.end:
                    first[holding] = min(place, first.get(holding, place))
        for holding in sorted(first, key=lambda holding: holding.segment.id):
            self._lose_from(holding.segment.path, first[holding])
        self._hold_fronts()
        for holding in self._holdings.with_losses:
            self.count(holding)

    def _first_seen(self, holding: SegmentPlacement) -> int:
        """The first position of a segment whose windows are needed once it is held again; its end if none are."""
        segment, seams = holding.segment, holding.seams.copy()
        front = holding.loss.front if holding.loss else None
        if front is not None and segment in segment.path.seen(front, self._windows):
            seams[front] -= 1
        place = min(+seams, default=segment.end)
        if segment.is_sealed and not +seams:
            return segment.end
        return min(segment.end, max(segment.start, self._windows.first(place)))

    def _lose_from(self, path: TokenPath, position: int) -> None:
        """Marks as lost all that must be recomputed to restore a path that lost `position`."""
        place = self._place(path, position)
        for segment, part_start, part_end in path.parts():
            holding, start = self._holdings[segment], max(place, part_start)
            if start < part_end and not holding.is_evicted and (holding.loss is None or start < holding.loss.first):
                self._placer.free(holding.cut(start))
                holding.window_runs = self._placer.roll_back(holding.window_runs, start, None)
                _begin(self._segments, holding, [(start, segment.end)])

    def _place(self, path: TokenPath, position: int) -> int:
        """The nearest position at or below `position` from which the path can be recomputed. A run begins or began
        there."""
        starts = {0}
        for segment, part_start, part_end in path.parts():
            holding = self._holdings[segment]
            starts |= {part_start, *(run.start for run in holding.runs if run.start < part_end)}
            lost = [*self._lost.get(holding, ()), *(holding.loss.left if holding.loss else ())]
            starts |= {start for start, _ in lost if start < part_end}
        ordered = sorted(starts)
        while True:
            position = ordered[bisect_right(ordered, position) - 1]
            below, _ = self._holdings.seams(path, position)
            if below == position:
                return position
            position = below

    def _hold_fronts(self) -> None:
        """Holds the windows from which each lost segment is recomputed, then releases the windows held for that
        before."""
        lossy = [(holding.segment.path, holding.loss) for holding in self._holdings.with_losses if holding.loss]
        old = [(path, loss.front) for path, loss in lossy]
        for path, loss in lossy:
            self._segments.hold(path, loss.first)
            loss.front = loss.first
        for path, front in old:
            if front is not None:
                self._segments.unpin(path, front)

    def count(self, holding: SegmentPlacement) -> None:
        """Computes the windows that a segment will hold once it is recomputed."""
        loss, end = holding.loss, holding.segment.end
        assert loss is not None
        kept_from = self._first_seen(holding)
        size, pool = self._placer.block_size, self._placer.window_pool
        loss.windows_from = kept_from
        loss.window_blocks = ceil_div(end - max(kept_from, loss.first), size) + 1
        if not holding.segment.is_sealed:  # a document that is still being ingested
            loss.window_blocks += pool.chunk_blocks(end + pool.num_blocks * size)


def begin_reload(placer: BlockPlacer, segments: SegmentStore, evicted: Iterable[SegmentPlacement]) -> None:
    """Marks evicted segments as lost, so that they are recomputed. Each must come after the segments that it
    continues."""
    for holding in evicted:
        segments.begin_reload(holding)
        if placer.windows is not None:
            _Rolled(placer, segments).count(holding)


def lay_out(segments: SegmentStore) -> tuple[SegmentLayout, ...]:
    """The layout of all segments that are held or lost. It replaces the pending release messages."""
    segments.take_forgotten()
    reported = [one for one in segments.holdings if one.segment.token_ids and not one.is_evicted]
    for holding in reported:
        holding.is_reported = True
    return tuple(
        SegmentLayout(holding.segment.id, holding.segment.start, tuple(holding.runs), holding.window_runs)
        for holding in reported
    )

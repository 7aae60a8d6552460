"""Remapping of placements to the ranks of the next epoch. Pure.

A run on a removed rank is lost. Where every rank holds the last keys of windowed layers, the windows in the middle of a
segment are not held. Tokens can then be recomputed only from a position whose visible windows are held, and from there
to the end.
"""

from bisect import bisect_right
from collections.abc import Iterable

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from longleaf.runs import Range, ceil_div


def remap(placer: BlockPlacer, segments: SegmentStore, rank_mapping: RankMapping, *, has_windows: bool) -> None:
    """Moves the placements to the ranks of the next epoch. Nothing may be reserved or under way.

    Without `has_windows`, no rank holds windows any more that it could send to others.
    """
    after, placements = rank_mapping.after, segments.placements
    gone = frozenset(range(len(placer.pools))) - after.keys()
    is_rolled = placer.windows is not None and (bool(gone) or not has_windows)
    segments.drop_cached(lambda path: is_rolled or _is_on(segments, path, gone))
    placer.change_ranks(rank_mapping)
    found = [(placement, placement.change_ranks(after)) for placement in placements]
    lost = {placement: ranges for placement, ranges in found if ranges}
    if is_rolled:
        _Rolled(placer, segments).lose(lost, has_windows=has_windows)
    else:
        for placement, ranges in lost.items():
            if placement.loss is None or placement.loss.left != ranges:
                _begin(segments, placement, ranges)


def _is_on(segments: SegmentStore, path: TokenPath, gone: frozenset[int]) -> bool:
    """Whether any part of a path was on a removed rank."""
    return any(
        run.rank in gone and run.start < end
        for segment, _, end in path.parts()
        for run in segments.placements[segment].runs
    )


def _begin(segments: SegmentStore, placement: SegmentPlacement, ranges: list[Range]) -> LostRanges:
    front = placement.loss.front if placement.loss else None
    loss = LostRanges(ranges, placement.loss)
    loss.front = front  # until the new front is held
    if placement.loss:
        placement.loss.front = None
    segments.begin_loss(placement, loss)
    return loss


class _Rolled:
    """Marks tokens as lost where windows are replicated."""

    def __init__(self, placer: BlockPlacer, segments: SegmentStore) -> None:
        assert placer.windows is not None
        self._placer = placer
        self._windows = placer.windows
        self._segments = segments
        self._placements = segments.placements
        self._lost: dict[SegmentPlacement, list[Range]] = {}

    def lose(self, lost: dict[SegmentPlacement, list[Range]], *, has_windows: bool) -> None:
        first = {placement: ranges[0][0] for placement, ranges in lost.items()}
        self._lost = lost
        if not has_windows:
            for placement in (one for one in self._placements if not one.is_evicted):
                placement.window_runs = self._placer.roll_back(placement.window_runs, 0, None)
                if (place := self._first_seen(placement)) < placement.segment.end:
                    first[placement] = min(place, first.get(placement, place))
        for placement in sorted(first, key=lambda placement: placement.segment.id):
            self._lose_from(placement.segment.path, first[placement])
        self._hold_fronts()
        for placement in self._placements.with_losses:
            self.count(placement)

    def _first_seen(self, placement: SegmentPlacement) -> int:
        """The first position of a segment whose windows are needed once it is recovered; its end if none are."""
        segment, seams = placement.segment, placement.seams.copy()
        front = placement.loss.front if placement.loss else None
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
            placement, start = self._placements[segment], max(place, part_start)
            if (
                start < part_end
                and not placement.is_evicted
                and (placement.loss is None or start < placement.loss.first)
            ):
                self._placer.free(placement.cut(start))
                placement.window_runs = self._placer.roll_back(placement.window_runs, start, None)
                _begin(self._segments, placement, [(start, segment.end)])

    def _place(self, path: TokenPath, position: int) -> int:
        """The nearest position at or below `position` from which the path can be recomputed. A run begins or began
        there."""
        starts = {0}
        for segment, part_start, part_end in path.parts():
            placement = self._placements[segment]
            starts |= {part_start, *(run.start for run in placement.runs if run.start < part_end)}
            lost = [*self._lost.get(placement, ()), *(placement.loss.left if placement.loss else ())]
            starts |= {start for start, _ in lost if start < part_end}
        ordered = sorted(starts)
        while True:
            position = ordered[bisect_right(ordered, position) - 1]
            below, _ = self._placements.seams(path, position)
            if below == position:
                return position
            position = below

    def _hold_fronts(self) -> None:
        """Holds the windows from which each lost segment is recomputed, then releases the windows held for that
        before."""
        lossy = [
            (placement.segment.path, placement.loss) for placement in self._placements.with_losses if placement.loss
        ]
        old = [(path, loss.front) for path, loss in lossy]
        for path, loss in lossy:
            self._segments.pin_windows(path, loss.first)
            loss.front = loss.first
        for path, front in old:
            if front is not None:
                self._segments.unpin_windows(path, front)

    def count(self, placement: SegmentPlacement) -> None:
        """Computes the windows that a segment will hold once it is recomputed."""
        loss, end = placement.loss, placement.segment.end
        assert loss is not None
        kept_from = self._first_seen(placement)
        size, pool = self._placer.window_block_size, self._placer.window_pool
        loss.windows_from = kept_from
        loss.window_blocks = ceil_div(end - max(kept_from, loss.first), size) + 1
        if not placement.segment.is_sealed:  # a document that is still being ingested
            loss.window_blocks += pool.chunk_blocks(end + pool.num_blocks * size)


def begin_reload(placer: BlockPlacer, segments: SegmentStore, evicted: Iterable[SegmentPlacement]) -> None:
    """Marks evicted segments as lost, so that they are recomputed. Each must come after the segments that it
    continues."""
    for placement in evicted:
        segments.begin_reload(placement)
        if placer.windows is not None:
            _Rolled(placer, segments).count(placement)

"""The slots of runs by segment, on this rank and on the others. Integers only.

The coordinator assigns blocks to runs; this module only records them.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.rank_protocol.step import RunTransfer
from longleaf.runs import Extent, Run, extents, join, union, without


class SegmentRange(NamedTuple):
    """Positions [start, end) of a segment that a path uses."""

    segment: int
    start: int
    end: int


class SegmentSlots:
    """The part of one segment that one rank holds, in position order."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []

    def put(self, run: Run, block_size: int) -> None:
        """Records a run, replacing earlier records of its positions, such as its shorter version."""
        resident = self.extents
        if resident and resident[-1].end > run.start:
            if resident[-1].start != run.start or resident[-1].end > run.end:
                self._replace(run.start, run.end, extents(run, block_size))
                return
            resident.pop()  # the common case, for rows of every step: the last run has grown
        resident.extend(extents(run, block_size))

    @property
    def end(self) -> int:
        """The position behind the last one; 0 where nothing is held."""
        return self.extents[-1].end if self.extents else 0

    def drop(self, start: int, end: int) -> None:
        """Drops the positions [start, end)."""
        self._replace(start, end, ())

    def _replace(self, start: int, end: int, found: Iterable[Extent]) -> None:
        """Replaces the records of the positions [start, end) by `found`."""
        resident = self.extents
        low = high = bisect.bisect_left(resident, (start,))
        if high < len(resident):
            high = bisect.bisect_left(resident, (end,), low)
        if low and resident[low - 1].end > start:
            low -= 1
        if low < high and (
            resident[low].start < start or resident[high - 1].end > end
        ):  # the records extend beyond the range
            first, last = resident[low], resident[high - 1]
            before = [Extent(first.start, start, first.slot)] if first.start < start else []
            behind = [Extent(end, last.end, last.slot + end - last.start)] if last.end > end else []
            found = [*before, *found, *behind]
        resident[low:high] = found

    def within(self, start: int, end: int) -> Iterator[Extent]:
        """The extents within the positions [start, end)."""
        first = bisect.bisect_right(self.extents, start, key=lambda extent: extent.end)
        for extent in self.extents[first:]:
            low, high = max(extent.start, start), min(extent.end, end)
            if low >= high:
                break
            yield Extent(low, high, extent.slot + low - extent.start)


class BlockTable:
    """The runs of segments on this rank and on the others: every plan describes all ranks.

    A path may use only the beginning of a segment: each part of a path ends where the next one starts. The rank of keys
    that are replicated on every rank is EVERY_RANK.
    """

    def __init__(self, rank: int, block_size: int, window_block_size: int | None = None) -> None:
        """`window_block_size`: that of runs of EVERY_RANK, if it is another one."""
        self.rank = rank
        self._block_size = block_size
        self._window_block_size = window_block_size or block_size
        self._slots: dict[int, dict[int, SegmentSlots]] = {}
        self._starts: dict[int, int] = {}

    def put(self, segment: int, runs: Sequence[Run], window_runs: Sequence[Run] = ()) -> None:
        """Records the runs of a step. The first step of a segment sets its start; runs of windows replace earlier
        ones.
        """
        self._starts.setdefault(segment, runs[0].start)
        resident = self._slots.setdefault(segment, {})
        resident.pop(EVERY_RANK, None)
        self._put(resident, (*runs, *window_runs))

    def _put(self, resident: dict[int, SegmentSlots], runs: Iterable[Run]) -> None:
        for run in runs:
            resident.setdefault(run.rank, SegmentSlots()).put(run, self._size(run.rank))

    def _size(self, rank: int) -> int:
        return self._window_block_size if rank == EVERY_RANK else self._block_size

    def replace(self, segments: Sequence[SegmentLayout]) -> None:
        """Replaces the whole table by a layout."""
        self.release([*self._slots])
        for segment in segments:
            self._starts[segment.segment] = segment.start
            resident = self._slots[segment.segment] = dict[int, SegmentSlots]()
            self._put(resident, (*segment.runs, *segment.window_runs))

    def move(self, transfers: Sequence[RunTransfer]) -> None:
        """Records runs at their new places. Raises ValueError, without any change, if a run is not held at its old
        place.
        """
        self.check(transfers)
        for transfer in transfers:
            resident, source, target = self._slots[transfer.segment], transfer.source, transfer.target
            resident[source.rank].drop(source.start, source.end)
            resident.setdefault(target.rank, SegmentSlots()).put(target, self._block_size)

    def check(self, transfers: Sequence[RunTransfer]) -> None:
        """Raises ValueError if a run that is to move is not held at its old place."""
        for transfer in transfers:
            segment, source = transfer.segment, transfer.source
            if not self.holds(segment, source):
                raise ValueError(f"segment {segment} has no run to move: {source}")

    def restore(self, segment: int, start: int, runs: Sequence[Run], window_runs: Sequence[Run] = ()) -> None:
        """Records restored runs; windows, if there are any, replace earlier ones. Raises as `check_free`, without any
        change.
        """
        self.check_free(segment, start, runs)
        self._starts[segment] = start
        resident = self._slots.setdefault(segment, {})
        if window_runs:
            resident.pop(EVERY_RANK, None)
        self._put(resident, (*runs, *window_runs))

    def check_free(self, segment: int, start: int, runs: Sequence[Run]) -> None:
        """Raises ValueError if positions of a segment are held already, one occurs twice, or the segment starts
        elsewhere.
        """
        if self._starts.get(segment, start) != start:
            raise ValueError(f"segment {segment} does not start at {start}")
        ranks = self._slots.get(segment, {}).keys() - {EVERY_RANK}
        if any(
            True for run in runs for rank in ranks for _ in self.resident_extents(segment, run.start, run.end, rank)
        ):
            raise ValueError(f"segment {segment} already has positions that are to be restored")
        if sum(map(len, runs)) != sum(end - low for low, end in union(run.range for run in runs)):
            raise ValueError(f"positions of segment {segment} are restored twice")

    def holds(self, segment: int, run: Run) -> bool:
        """Whether a run is held, in these blocks."""
        there = self.resident_extents(segment, run.start, run.end, run.rank) if segment in self._slots else ()
        return slots_of(there) == slots_of(extents(run, self._size(run.rank)))

    def cut_back(self, segment: int, end: int) -> None:
        """Drops the positions of a segment from `end` on, on all ranks: refused drafts, or tokens that were computed
        after the end of an answer."""
        for resident in self._slots[segment].values():
            resident.drop(end, max(end, resident.end))

    def release(self, segments: Sequence[int]) -> None:
        """Drops segments."""
        for segment in segments:
            self._slots.pop(segment, None)
            self._starts.pop(segment, None)

    def parts(self, path: Sequence[int], end: int) -> list[SegmentRange]:
        """The parts of its segments that a path uses before the position `end`."""
        starts = [self._starts[segment] for segment in path]
        ends = [*(min(start, end) for start in starts[1:]), end]
        return [SegmentRange(*part) for part in zip(path, starts, ends, strict=True) if part[1] < part[2]]

    def resident_extents(self, segment: int, start: int, end: int, rank: int | None = None) -> Iterator[Extent]:
        """The extents of a rank, by default this one, within positions [start, end) of a segment, in position order."""
        resident = self._slots[segment].get(self.rank if rank is None else rank)
        return resident.within(start, end) if resident else iter(())

    def extents(
        self,
        path: Sequence[int],
        start: int,
        end: int,
        rank: int | None = None,
        hidden: Sequence[tuple[int, int]] = (),
    ) -> Iterator[Extent]:
        """Extents of a path, without hidden positions."""
        for part in self.parts(path, end):
            for low, high in without(max(part.start, start), part.end, hidden):
                yield from self.resident_extents(part.segment, low, high, rank)


def slots_of(extents: Iterable[Extent]) -> list[int]:
    """Each slot of extents."""
    return [slot for extent in extents for slot in range(extent.slot, extent.slot + extent.end - extent.start)]


def stretches(extents: Iterable[Extent]) -> list[tuple[int, int]]:
    """Slots [start, end) of extents, adjacent ones joined: order and gaps in the positions do not matter to queries
    that see all of them.
    """
    return join((extent.slot, extent.slot + extent.end - extent.start) for extent in extents)

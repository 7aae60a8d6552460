"""The placement of segments on the ranks of an epoch, and that of the paths through them."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.positions import UNLIMITED
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import WindowSpec
from longleaf.runs import Run, join, until


class SegmentPlacement:
    """The runs that hold a segment, and its reference counts."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.runs: list[Run] = []
        self.num_sharded = 0
        """Number of blocks in `runs`. It is cached because a path may have thousands of segments, all counted for each
        request."""
        self.window_runs: tuple[Run, ...] = ()
        """Runs in the window pool. While the segment grows, they hold the positions that its next token sees, and
        little more; once it is sealed, the positions that are seen from its seams."""
        self.seams = Counter[int]()
        """Reference counts of seams: positions at which paths continue, or may continue, and that see windows of this
        segment."""
        self.num_references = 1
        self.num_cache_references = 0
        """References that only keep the segment cached for future prompts."""
        self.num_idle_references = 0
        """References of evicted contexts, which need no keys until they are activated."""
        self.is_evicted = False
        """The segment is evicted: no rank holds any of it, and only deferred jobs wait for it."""
        self.num_evicted = BlockCount()
        """Maximum number of its blocks once it is reloaded, recorded at its eviction."""
        self.version = 0
        """Changes with each eviction."""
        self.is_reported = True
        """The ranks know the segment, provided that it has tokens."""
        self.loss: LostRanges | None = None
        """The lost ranges of the segment, or None."""
        self.incoming: tuple[Run, ...] = ()
        """Runs that the plan under way recomputes or copies from another rank."""

    @property
    def num_blocks(self) -> BlockCount:
        return count_all([self])

    @property
    def num_reserved(self) -> BlockCount:
        """Blocks reserved for the segment outside `runs`: those of the plan under way and those for its lost ranges."""
        incoming = BlockCount(sum(len(run.blocks) for run in self.incoming))
        return incoming + self.loss.reservation.left if self.loss and self.loss.reservation else incoming

    def num_wanted(self, block_size: int) -> BlockCount:
        """Its blocks once nothing of it is lost."""
        return self.num_blocks + self.loss.num_blocks(block_size) if self.loss else self.num_blocks

    @property
    def first_seam(self) -> int:
        """The first position at which a path continues, or from which the segment is recomputed."""
        seam = min(self.seams, default=UNLIMITED)
        return min(seam, self.loss.first) if self.loss and self.loss.left else seam

    @property
    def is_idle(self) -> bool:
        """Only evicted contexts and cached prompts refer to it."""
        return 0 < self.num_idle_references == self.num_references - self.num_cache_references

    def is_idle_after(self, num_dropped: int) -> bool:
        """Whether only evicted contexts and cached prompts refer to it once so many other references are dropped."""
        return self.num_idle_references + num_dropped == self.num_references - self.num_cache_references

    @property
    def num_reclaimable(self) -> BlockCount:
        """The blocks of the segment if it is only cached for future prompts, else none."""
        return (
            self.num_blocks
            if self.num_cache_references and self.num_cache_references == self.num_references
            else BlockCount()
        )

    def extend(self, token_ids: Sequence[int], runs: Sequence[Run]) -> None:
        """Adds tokens and their runs. A first run with the start of the current last run replaces it."""
        assert runs
        if self.runs and self.runs[-1].start == runs[0].start:
            self.num_sharded -= len(self.runs.pop().blocks)
        self.runs.extend(runs)
        for run in runs:
            self.num_sharded += len(run.blocks)
        self.segment.extend(token_ids)

    def put(self, runs: Iterable[Run]) -> None:
        """Adds runs of tokens that were lost."""
        for run in runs:
            insort(self.runs, run, key=_start)
            self.num_sharded += len(run.blocks)

    def cut(self, end: int) -> list[Run]:
        """Removes and returns the runs from position `end` on. No run may cross `end`."""
        index = bisect_left(self.runs, end, key=_start)
        taken, self.runs = self.runs[index:], self.runs[:index]
        assert not self.runs or self.runs[-1].end <= end
        self.num_sharded -= sum(len(run.blocks) for run in taken)
        return taken

    def truncate(self, end: int, block_size: int) -> list[Run]:
        """Removes the positions from `end` on. Returns runs with the blocks that hold none of the others."""
        index = bisect_left(self.runs, end, key=_start)
        removed, self.runs = self.runs[index:], self.runs[:index]
        if self.runs and self.runs[-1].end > end:
            last = self.runs.pop()
            retained = until(last, end, block_size)
            self.runs.append(retained)
            if blocks := last.blocks[len(retained.blocks) :]:
                removed.append(Run(last.rank, retained.start + len(retained.blocks) * block_size, last.end, blocks))
        self.num_sharded -= sum(len(run.blocks) for run in removed)
        return removed

    def replace(self, old: Run, new: Run) -> None:
        """Replaces `old`, the first blocks of a run, with `new`."""
        index = bisect_left(self.runs, old.start, key=_start)
        run = self.runs[index]
        assert (run.rank, run.start, run.blocks[: len(old.blocks)]) == (old.rank, old.start, old.blocks)
        rest = Run(run.rank, old.end, run.end, run.blocks[len(old.blocks) :])
        self.runs[index : index + 1] = [new, rest] if len(rest) else [new]

    def change_ranks(self, after: Mapping[int, int]) -> list[tuple[int, int]]:
        """Keeps the runs on remaining ranks, under their new rank numbers. Returns all lost ranges, with neighbours
        joined, including those lost before and those under way."""
        gone = [run.range for run in self.runs if run.rank not in after]
        lost = sorted([*gone, *(self.loss.left if self.loss else ())])
        if gone or any(old != new for old, new in after.items()):
            runs = [run for run in self.runs if run.rank in after]
            self.runs = [Run(after[run.rank], run.start, run.end, run.blocks) for run in runs]
            self.num_sharded = sum(len(run.blocks) for run in runs)
        return join(lost)

    def audit(self) -> None:
        """Asserts that the runs and the lost ranges cover the tokens, in order and without gaps, unless the segment is
        evicted."""
        assert self.num_references >= max(1, self.num_cache_references + self.num_idle_references)
        if self.is_evicted:
            assert self.is_idle
            assert not (self.runs or self.num_sharded or self.window_runs or self.incoming or self.loss)
            return
        lost = self.loss.left if self.loss else []
        stretches = sorted([*(run.range for run in self.runs), *lost])
        ends = [self.segment.start, *(end for _, end in stretches)]
        assert [start for start, _ in stretches] == ends[:-1]
        assert ends[-1] == self.segment.end
        assert all(start < end for start, end in stretches)
        assert self.loss is None or lost
        assert self.num_sharded == sum(len(run.blocks) for run in self.runs)


def _start(run: Run) -> int:
    return run.start


def count_all(placements: Iterable[SegmentPlacement]) -> BlockCount:
    """The total number of blocks of some placements."""
    sharded = windows = 0
    for placement in placements:
        sharded += placement.num_sharded
        for run in placement.window_runs:
            windows += len(run.blocks)
    return BlockCount(sharded, windows)


class SegmentPlacements:
    """Placements by segment. `windows` is None unless each rank holds a copy of the keys of windowed layers."""

    def __init__(self, windows: WindowSpec | None = None) -> None:
        self.windows = windows
        self._by_segment: dict[Segment, SegmentPlacement] = {}
        self._by_id: dict[int, SegmentPlacement] = {}
        self._lossy: dict[Segment, SegmentPlacement] = {}
        self._evicted: dict[Segment, SegmentPlacement] = {}

    def __iter__(self) -> Iterator[SegmentPlacement]:
        return iter(self._by_segment.values())

    def __getitem__(self, segment: Segment) -> SegmentPlacement:
        return self._by_segment[segment]

    def find(self, segment_id: int) -> SegmentPlacement | None:
        return self._by_id.get(segment_id)

    def add(self, placement: SegmentPlacement) -> None:
        self._by_segment[placement.segment] = self._by_id[placement.segment.id] = placement

    def remove(self, placement: SegmentPlacement) -> None:
        del self._by_segment[placement.segment], self._by_id[placement.segment.id]
        self._evicted.pop(placement.segment, None)

    def mark_evicted(self, placement: SegmentPlacement, *, is_evicted: bool) -> None:
        """Marks a segment as evicted, or as no longer evicted."""
        placement.is_evicted = is_evicted
        if is_evicted:
            self._evicted[placement.segment] = placement
        else:
            del self._evicted[placement.segment]

    @property
    def with_losses(self) -> list[SegmentPlacement]:
        """Placements with lost ranges, each after the segments that it continues."""
        return sorted(self._lossy.values(), key=lambda placement: placement.segment.id)

    @property
    def is_whole(self) -> bool:
        return not self._lossy

    def note_loss(self, placement: SegmentPlacement, loss: LostRanges | None) -> None:
        """Sets the lost ranges of a segment; None clears them."""
        placement.loss = loss
        if loss is None:
            self._lossy.pop(placement.segment, None)
        else:
            self._lossy[placement.segment] = placement

    def first_lost(self, path: TokenPath) -> tuple[SegmentPlacement, int] | None:
        """The first segment of a path that is evicted or has lost keys, and the position at which the path leaves it;
        None if the whole path is held."""
        if self._lossy or self._evicted:
            for segment, _, end in path.parts():
                if (placement := self._evicted.get(segment)) is not None:
                    return placement, end
                if (placement := self._lossy.get(segment)) and placement.loss and placement.loss.first < end:
                    return placement, end
        return None

    def num_lost(self, path: TokenPath) -> int:
        """Number of lost tokens of a path."""
        if not self._lossy:
            return 0
        parts = ((self._lossy.get(segment), end) for segment, _, end in path.parts())
        return sum(placement.loss.num_before(end) for placement, end in parts if placement and placement.loss)

    def holds(self, path: TokenPath) -> bool:
        """No part of a path is lost or evicted."""
        return self.first_lost(path) is None

    def evicted(self, path: TokenPath) -> list[SegmentPlacement]:
        """The evicted segments of a path, in order."""
        if not self._evicted:
            return []
        return [placement for segment in path.segments if (placement := self._evicted.get(segment)) is not None]

    def whole_end(self, path: TokenPath) -> int:
        """The end of the usable part of a path: the first lost or evicted position, or the end of the path. With
        replicated windows it is the first position of the original loss, because later windows are held only during the
        recovery."""
        found = self.first_lost(path)
        if found is None:
            return path.end
        if found[0].loss is None:
            return found[0].segment.start
        return found[0].loss.first if self.windows is None else found[0].loss.ranges[0][0]

    def for_segments(self, segments: Iterable[Segment]) -> list[SegmentPlacement]:
        """The placements of `segments`, in order."""
        return list(map(self._by_segment.__getitem__, segments))  # there may be thousands

    def num_blocks(self, path: TokenPath) -> BlockCount:
        """Blocks of all segments of a path, including those the path does not use."""
        return count_all(self.for_segments(path.segments))

    def shares(self, path: TokenPath, world_size: int) -> list[int]:
        """Number of tokens of a path on each rank."""
        resident = [0] * world_size
        for segment, _, end in path.parts():
            for run in self[segment].runs:
                resident[run.rank] += max(0, min(run.end, end) - run.start)
        return resident

    def num_window_tokens(self, path: TokenPath) -> int:
        """Number of tokens of a path in the window pool."""
        return sum(end - start for start, end in self._windows_of(path))

    def seams(self, path: TokenPath, position: int) -> tuple[int, int]:
        """The nearest positions, at or below `position` and at or above it, at which the path can be cut and continued:
        all keys that the next token sees are held there. Without windows, any position qualifies."""
        if (windows := self.windows) is None:
            return position, position
        below, above, stride = 0, path.end, windows.stride
        if stride:
            below, above = position - position % stride, min(path.end, position - position % -stride)
        for start, end in self._windows_of(path):
            low = start + bisect_left(range(start, end + 1), start, key=windows.first)
            if low <= min(position, end):
                below = max(below, min(position, end))
            if max(position, low) <= end:
                return below, min(above, max(position, low))
        return below, above

    def _windows_of(self, path: TokenPath) -> list[tuple[int, int]]:
        """Position ranges in the window pool, in order, with an empty range at the end of each part."""
        resident = [(0, 0)]
        for segment, _, part_end in path.parts():
            resident += [
                (run.start, min(run.end, part_end)) for run in self[segment].window_runs if run.start < part_end
            ]
            resident.append((part_end, part_end))
        return join(resident)

    def audit(self, path: TokenPath) -> None:
        """Asserts that a path is valid and can be continued: all keys that its next token sees are held."""
        path.audit()
        if self.windows is not None and self.holds(path):
            runs = [(run, end) for segment, _, end in path.parts() for run in self[segment].window_runs]
            resident = {position for run, end in runs for position in range(run.start, min(run.end, end))}
            assert resident.issuperset(range(self.windows.first(path.end), path.end))

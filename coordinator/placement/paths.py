"""Segments, and the paths that lead through them: contexts, forks and sequences together are a tree."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.placement.blocks import Blocks
from longleaf.geometry import OWN_ROPE, Rope, Windows
from longleaf.runs import Run, join


@dataclass(frozen=True, slots=True)
class Path:
    """Segments that continue one another from position 0 on.

    Each is used up to the start of the next one, the last one up to position `end`: a path may branch off anywhere.
    """

    segments: tuple["Segment", ...] = ()
    end: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """What ranks are told of the path."""
        return tuple(segment.id for segment in self.segments)

    @property
    def num_blocks(self) -> Blocks:
        """Blocks of the segments, used or not."""
        return count_all(self.segments)

    def parts(self) -> Iterator[tuple["Segment", int, int]]:
        """The segments, and the positions [start, end) for which each is used."""
        ends = [*(segment.start for segment in self.segments[1:]), self.end]
        for segment, end in zip(self.segments, ends, strict=False):  # an empty path has an end, too
            yield segment, segment.start, end

    def cut(self, end: int) -> "Path":
        """The beginning of the path, up to position `end`."""
        assert end <= self.end
        return Path(tuple(segment for segment in self.segments if segment.start < end), end)

    @property
    def num_window_tokens(self) -> int:
        """Tokens that lie in the windows' pool."""
        return sum(end - start for start, end in self._held_windows())

    def seams(self, position: int, windows: Windows | None) -> tuple[int, int]:
        """The nearest positions, up to `position` and from it on, at which the path can be cut and continued: those of
        which all that the next token sees is held. With `windows` None, any."""
        if windows is None:
            return position, position
        below, above, stride = 0, self.end, windows.stride
        if stride:
            below, above = position - position % stride, min(self.end, position - position % -stride)
        for start, end in self._held_windows():
            low = start + bisect_left(range(start, end + 1), start, key=windows.first)
            if low <= min(position, end):
                below = max(below, min(position, end))
            if max(position, low) <= end:
                return below, min(above, max(position, low))
        return below, above

    def seen(self, end: int, windows: Windows | None) -> Iterator["Segment"]:
        """The segments of which a token at `end`, a position of the path, sees windows; the last one is first."""
        if windows is None:
            return
        first, part_end = windows.first(end), end
        for segment in reversed(self.segments):
            if first >= part_end:
                return
            if segment.start < end:
                yield segment
                part_end = segment.start

    def _held_windows(self) -> list[tuple[int, int]]:
        """Stretches of positions that lie in the windows' pool, in order; empty ones where a part ends without."""
        held = [(0, 0)]
        for segment, _, part_end in self.parts():
            held += [(run.start, min(run.end, part_end)) for run in segment.window_runs if run.start < part_end]
            held.append((part_end, part_end))
        return join(held)

    def token_ids(self, start: int = 0, stop: int | None = None) -> "array[int]":
        """The tokens from position `start` on, up to `stop` if it is given."""
        found = array("I")
        for segment, part_start, end in self.parts():
            part_end = end if stop is None else max(part_start, min(end, stop))
            found += segment.token_ids[max(0, start - part_start) : part_end - part_start]
        return found

    def num_common(self, token_ids: "array[int]") -> int:
        """How many of `token_ids` the path begins with."""
        for segment, start, end in self.parts():
            count = _num_common(segment.token_ids[: end - start], token_ids[start:end])
            if count < end - start:
                return start + count
        return self.end

    def check(self, windows: Windows | None = None) -> None:
        """Every part has positions, and continues the path before it; what the next token sees is held."""
        assert self.segments or self.end == 0
        for i, (segment, start, end) in enumerate(self.parts()):
            assert start < end <= segment.end
            assert segment.before == Path(self.segments[:i], start)
        if windows is not None:
            parts = list(self.parts())
            runs = [(run, end) for segment, _, end in parts for run in segment.window_runs]
            held = {position for run, end in runs for position in range(run.start, min(run.end, end))}
            assert held.issuperset(range(windows.first(self.end), self.end))


NOWHERE = Path()
"""Where contexts and prompts begin."""


def _num_common(a: "array[int]", b: "array[int]") -> int:
    """How many ids two arrays have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


class Segment:
    """Tokens that continue the path `before`, and the runs that hold them. Grows until it is sealed."""

    def __init__(self, segment_id: int, before: Path, rope: Rope = OWN_ROPE) -> None:
        self.id = segment_id
        self.before = before
        self.rope = rope
        """How the keys are rotated, here and in all of the path."""
        self.token_ids = array("I")
        self.runs: list[Run] = []
        self.window_runs: tuple[Run, ...] = ()
        """Runs in the windows' pool: while it grows what its next token sees of it, and little more; once it is sealed
        what is seen of it from its seams."""
        self.seams = Counter[int]()
        """Positions at which paths go on, or may, and of whose windows a part lies here; how often each is held."""
        self.num_references = 1
        self.num_kept = 0
        """References that only keep the segment for prompts to come."""
        self.is_sealed = False

    @property
    def start(self) -> int:
        return self.before.end

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def path(self) -> Path:
        """The path to the segment's end."""
        return Path((*self.before.segments, self), self.end)

    @property
    def num_blocks(self) -> Blocks:
        return count_all([self])

    def fill(self, position: int, token_id: int) -> None:
        """Tells the id of a token that was placed before it was known."""
        self.token_ids[position - self.start] = token_id

    def extend(self, token_ids: Sequence[int], runs: Sequence[Run]) -> None:
        """Adds tokens and the runs that hold them; a first run with a known start is the last one, grown."""
        assert runs
        assert not self.is_sealed
        if self.runs and self.runs[-1].start == runs[0].start:
            self.runs.pop()
        self.runs.extend(runs)
        self.token_ids.extend(token_ids)

    def check(self) -> None:
        """The runs cover the tokens, in order and without gaps; what the segment continues is alive."""
        ends = [self.start, *(run.end for run in self.runs)]
        assert [run.start for run in self.runs] == ends[:-1]
        assert ends[-1] == self.end
        assert all(len(run) > 0 for run in self.runs)
        assert self.num_references >= max(1, self.num_kept)
        assert all(segment.num_references >= self.num_references for segment in self.before.segments)
        assert all(segment.rope == self.rope for segment in self.before.segments)


def count_all(segments: Iterable[Segment]) -> Blocks:
    """The blocks of segments."""
    sharded = windows = 0
    for segment in segments:  # may be thousands
        for run in segment.runs:
            sharded += len(run.blocks)
        for run in segment.window_runs:
            windows += len(run.blocks)
    return Blocks(sharded, windows)

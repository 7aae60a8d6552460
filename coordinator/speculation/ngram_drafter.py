"""What may follow the last tokens of a sequence: drafts from its own path and answer, never from others'. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from coordinator.kv_cache.token_paths import Segment
from coordinator.speculation.ngram_index import MAX_SIZE, NgramMatch, SegmentIndex

MAX_LONG = 64
"""Segments of a path that are looked at, its last ones: a path may have thousands."""
SHORT_TOKENS = 1 << 12
MAX_SHORT = 12
"""Of segments with fewer tokens than SHORT_TOKENS only so many are looked at: each takes as long as a long one."""
ENTERED_AT_ONCE = 4096
"""Tokens of the growing segment that a draft enters at most before it looks: others are found later."""


class Draft(NamedTuple):
    """Guesses of the next tokens."""

    size: int
    """Tokens of the n-gram after which they were found; 0: none was."""
    token_ids: tuple[int, ...]

    def cut(self, count: int) -> "Draft":
        """The first tokens of it."""
        return Draft(self.size, self.token_ids[:count])


NO_DRAFT = Draft(0, ())


class NgramIndexes:
    """The indexes of segments. Each is gone with its segment, and made anew where a segment is."""

    def __init__(self) -> None:
        self._by_segment = WeakKeyDictionary[Segment, SegmentIndex]()

    def __len__(self) -> int:
        return len(self._by_segment)

    def of(self, segment: Segment) -> SegmentIndex:
        """The index of a segment, which is empty at first."""
        if (index := self._by_segment.get(segment)) is None:
            index = self._by_segment[segment] = SegmentIndex(segment.token_ids)
        return index

    def enter(self, segment: Segment, end: int) -> None:
        """Enters the tokens of a segment before position `end`, which nothing takes back any more."""
        self.of(segment).enter(end - segment.start)

    @property
    def num_bytes(self) -> int:
        return sum(index.num_bytes for index in self._by_segment.values())


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment of a path, of which that sees `count` tokens."""

    index: SegmentIndex
    count: int

    @property
    def num_missing(self) -> int:
        """Tokens that are not entered."""
        return max(0, self.count - self.index.count)


def _near(parts: Sequence[_Part]) -> list[int]:
    """Numbers of the parts that are looked at, the last one first."""
    numbers = range(len(parts) - 1, -1, -1)
    long = [number for number in numbers if parts[number].count >= SHORT_TOKENS]
    short = [number for number in numbers if parts[number].count < SHORT_TOKENS]
    return sorted([*long[:MAX_LONG], *short[:MAX_SHORT]], reverse=True)


class NgramDrafter:
    """Drafts for the sequence that grows the segment `tail`, from that and from the path before it.

    A fork sees its parent's segments up to its own end, whatever they grew to.
    """

    def __init__(self, tail: Segment, indexes: NgramIndexes) -> None:
        self._parts = [_Part(indexes.of(segment), end - start) for segment, start, end in tail.before.parts()]
        self._near = _near(self._parts)
        self._tail, self._index = tail, indexes.of(tail)
        self._quoted: NgramMatch | None = None
        """What was found last, before position `_end`."""
        self._end = 0

    def enter(self, num_tokens: int) -> bool:
        """Enters up to so many tokens of the path that were not entered when they were read, the last segments first.
        Whether that was all."""
        near = [self._parts[number] for number in self._near]
        for part in near:
            taken = min(num_tokens, part.num_missing)
            part.index.enter(part.index.count + taken)
            num_tokens -= taken
        return not any(part.num_missing for part in near)

    def draft(self, end: int, count: int) -> Draft:
        """The tokens that followed the longest n-gram like the one before position `end`, of equally long ones the
        last: at most `count`.

        All tokens before `end` are known, and the tail's are never taken back. Where the text found runs up to `end` it
        goes on with the draft itself: what repeats will repeat.
        """
        tail, num_known = self._tail, end - self._tail.start
        assert 0 < num_known <= len(tail.token_ids)
        self._index.enter(min(num_known - 1, self._index.count + ENTERED_AT_ONCE))  # what follows the last is unknown
        match = NgramMatch(self._last(num_known))
        match.begin(len(self._parts))
        self._index.match(match, num_known - 1)
        if not self._goes_on(match, end):
            self._look(match)
        self._quoted, self._end = match, end
        if not match.size or count < 1:
            return NO_DRAFT
        return Draft(match.size, self._continuation(match, num_known, count))

    def _goes_on(self, match: NgramMatch, end: int) -> bool:
        """Whether the tokens up to `end` are those that followed what was found last, in the same part of the path:
        nothing in it can be longer then, and what `_look` would find need not be looked for."""
        quoted, count = self._quoted, end - self._end
        if quoted is None or not quoted.size or quoted.part == len(self._parts) or count < 0:
            return False
        part, after, known = self._parts[quoted.part], quoted.offset + 1, end - self._tail.start
        came = self._tail.token_ids[known - count : known]
        if after + count > part.count or part.index.ids[after : after + count] != came:
            return False
        match.take(quoted.part, quoted.offset + count, min(MAX_SIZE, quoted.size + count))
        return True

    def _look(self, match: NgramMatch) -> None:
        """Looks through the path, its last parts first."""
        for number in self._near:
            if match.is_longest:
                return
            match.begin(number)
            self._parts[number].index.match(match, self._parts[number].count)

    def _last(self, num_known: int) -> Sequence[int]:
        """The last tokens, up to MAX_SIZE."""
        ids = self._tail.token_ids[max(0, num_known - MAX_SIZE) : num_known]
        for part in reversed(self._parts):
            if len(ids) >= MAX_SIZE:
                break
            ids = part.index.ids[max(0, part.count - MAX_SIZE + len(ids)) : part.count] + ids
        return ids

    def _continuation(self, match: NgramMatch, num_known: int, count: int) -> tuple[int, ...]:
        """The `count` tokens after what was found, of which the last ones may be their own beginning."""
        found, offset = array("I"), match.offset + 1
        for part in self._parts[match.part :]:
            found += part.index.ids[offset : min(part.count, offset + count - len(found))]
            offset = max(0, offset - part.count)
        found += self._tail.token_ids[offset : min(num_known, offset + count - len(found))]
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return tuple(found)

"""N-gram drafter: drafts the next tokens of a sequence from its path and its answer, never from other sequences.
Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from coordinator.kv_cache.token_paths import Segment
from coordinator.speculation.ngram_index import MAX_SIZE, NgramMatch, SegmentIndex

MAX_LONG = 64
"""Maximum number of long segments of a path that are searched, the last ones: a path may have thousands."""
SHORT_TOKENS = 1 << 12
MAX_SHORT = 12
"""Maximum number of segments with fewer than SHORT_TOKENS tokens that are searched: each takes as long as a long
one."""
MAX_INDEXED_TOKENS = 4096
"""Maximum number of tokens of the growing segment that are indexed before a draft; later tokens are indexed by later
drafts."""


class Draft(NamedTuple):
    """A draft of the next tokens."""

    size: int
    """Size of the n-gram that matched; 0 if none did."""
    token_ids: tuple[int, ...]

    def cut(self, count: int) -> "Draft":
        """The first `count` tokens of the draft."""
        return Draft(self.size, self.token_ids[:count])


NO_DRAFT = Draft(0, ())


class NgramIndexes:
    """The n-gram indexes by segment. An index is removed with its segment, and rebuilt for a new one."""

    def __init__(self) -> None:
        self._by_segment = WeakKeyDictionary[Segment, SegmentIndex]()

    def __len__(self) -> int:
        return len(self._by_segment)

    def get(self, segment: Segment) -> SegmentIndex:
        """The index of a segment; a new one is empty."""
        if (index := self._by_segment.get(segment)) is None:
            index = self._by_segment[segment] = SegmentIndex(segment.token_ids)
        return index

    def index_segment(self, segment: Segment, end: int) -> None:
        """Indexes the tokens of a segment before position `end`, which must not be removed later."""
        self.get(segment).add(end - segment.start)

    @property
    def num_bytes(self) -> int:
        return sum(index.num_bytes for index in self._by_segment.values())


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment of a path, of which the path uses `count` tokens."""

    index: SegmentIndex
    count: int

    @property
    def num_missing(self) -> int:
        """Number of tokens that are not indexed yet."""
        return max(0, self.count - self.index.count)


def _near(parts: Sequence[_Part]) -> list[int]:
    """Numbers of the parts to search, the last one first."""
    numbers = range(len(parts) - 1, -1, -1)
    long = [number for number in numbers if parts[number].count >= SHORT_TOKENS]
    short = [number for number in numbers if parts[number].count < SHORT_TOKENS]
    return sorted([*long[:MAX_LONG], *short[:MAX_SHORT]], reverse=True)


class NgramDrafter:
    """Drafts for the sequence that grows the segment `tail`, from the tail and the path before it.

    A fork uses its parent's segments only up to the position of the fork.
    """

    def __init__(self, tail: Segment, indexes: NgramIndexes) -> None:
        self._parts = [_Part(indexes.get(segment), end - start) for segment, start, end in tail.before.parts()]
        self._near = _near(self._parts)
        self._tail, self._index = tail, indexes.get(tail)
        self._quoted: NgramMatch | None = None
        """The last match, found for the position `_end`."""
        self._end = 0

    def index_path(self, num_tokens: int) -> bool:
        """Indexes up to `num_tokens` tokens of the path that were not indexed during the prefill, the last segments
        first. Returns whether all are indexed."""
        near = [self._parts[number] for number in self._near]
        for part in near:
            taken = min(num_tokens, part.num_missing)
            part.index.add(part.index.count + taken)
            num_tokens -= taken
        return not any(part.num_missing for part in near)

    def draft(self, end: int, count: int) -> Draft:
        """At most `count` tokens that followed the longest match of the n-gram before position `end`. Among matches of
        equal length, the last one is used.

        All tokens before `end` must be known, and those of the tail must not be removed later. Where the matched text
        reaches `end`, the draft repeats it.
        """
        tail, num_known = self._tail, end - self._tail.start
        assert 0 < num_known <= len(tail.token_ids)
        self._index.add(min(num_known - 1, self._index.count + MAX_INDEXED_TOKENS))  # no token follows the last one yet
        match = NgramMatch(self._last(num_known))
        match.begin(len(self._parts))
        self._index.match(match, num_known - 1)
        if not self._continues_match(match, end):
            self._search(match)
        self._quoted, self._end = match, end
        if not match.size or count < 1:
            return NO_DRAFT
        return Draft(match.size, self._continuation(match, num_known, count))

    def _continues_match(self, match: NgramMatch, end: int) -> bool:
        """Whether the tokens up to `end` continue the last match in the same part of the path. Then no longer match is
        possible in that part, and `_search` is not needed."""
        quoted, count = self._quoted, end - self._end
        if quoted is None or not quoted.size or quoted.part == len(self._parts) or count < 0:
            return False
        part, after, known = self._parts[quoted.part], quoted.offset + 1, end - self._tail.start
        came = self._tail.token_ids[known - count : known]
        if after + count > part.count or part.index.ids[after : after + count] != came:
            return False
        match.update(quoted.part, quoted.offset + count, min(MAX_SIZE, quoted.size + count))
        return True

    def _search(self, match: NgramMatch) -> None:
        """Searches the path, its last parts first."""
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
        """The `count` tokens after the match. A continuation that reaches the end of the known tokens repeats
        itself."""
        found, offset = array("I"), match.offset + 1
        for part in self._parts[match.part :]:
            found += part.index.ids[offset : min(part.count, offset + count - len(found))]
            offset = max(0, offset - part.count)
        found += self._tail.token_ids[offset : min(num_known, offset + count - len(found))]
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return tuple(found)

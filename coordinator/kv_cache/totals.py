"""Totals over the contexts of a tenant. Each change updates them, because quotas read them for each request."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from coordinator.kv_cache.token_paths import Segment


class Totals:
    """Sums over the contexts of one tenant. A segment that several contexts share counts once for each of them."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        """Context ids, sorted."""
        self.num_tokens = 0
        self.stored_bytes = 0
        """Sum over all segments."""
        self._segments = Counter[int]()

    @property
    def count(self) -> int:
        """Number of contexts."""
        return len(self._ids)

    @property
    def segments(self) -> Mapping[int, int]:
        """Number of contexts that contain a segment, by segment id."""
        return self._segments

    def ids(self, after: str) -> Sequence[str]:
        """Sorted context ids that come after `after`."""
        return self._ids[bisect_right(self._ids, after) :]

    def add(self, context_id: str, num_tokens: int, segments: Iterable[Segment]) -> None:
        """Adds a context."""
        insort(self._ids, context_id)
        self.grow(num_tokens, segments)

    def grow(self, num_tokens: int, segments: Iterable[Segment]) -> None:
        """Adds tokens and segments to a context."""
        self.num_tokens += num_tokens
        for segment in segments:
            self.stored_bytes += segment.stored_bytes
            self._segments[segment.id] += 1

    def remove(self, context_id: str, num_tokens: int, segments: Iterable[Segment]) -> None:
        """Removes a context with its current tokens and segments."""
        del self._ids[bisect_left(self._ids, context_id)]
        self.num_tokens -= num_tokens
        for segment in segments:
            self.stored_bytes -= segment.stored_bytes
            self._segments[segment.id] -= 1
            if not self._segments[segment.id]:
                del self._segments[segment.id]

    def state(self) -> tuple[object, ...]:
        """All fields, for comparison."""
        return self._ids, self.num_tokens, self.stored_bytes, self._segments

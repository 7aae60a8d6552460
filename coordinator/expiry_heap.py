"""Deadlines of requests and expiry times of contexts. Times are in seconds on the caller's clock."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str)


class ExpiryHeap(Generic[Key]):
    """Deadlines by key; keys without a deadline are not stored. No operation walks through all entries, since there may
    be many."""

    def __init__(self) -> None:
        self._by_key: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        """All entries, including stale ones that have since been changed or discarded."""

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    @property
    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and not self._is_valid(*self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _is_valid(self, deadline: float, key: Key) -> bool:
        return self._by_key.get(key) == deadline

    def add(self, key: Key, deadline: float | None) -> None:
        """Replaces the deadline of the key; None removes it."""
        self.discard(key)
        if deadline is None:
            return
        self._by_key[key] = deadline
        if len(self._heap) <= 2 * len(self._by_key):
            heappush(self._heap, (deadline, key))
        else:
            self._heap = [(deadline, key) for key, deadline in self._by_key.items()]
            heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._by_key.pop(key, None)

    def passed(self, now: float) -> list[Key]:
        """Keys whose deadline is at or before `now`, the earliest first. They stay until they are discarded."""
        found: dict[Key, float] = {}
        while (first := self.next) is not None and first <= now:
            _, key = heappop(self._heap)
            found[key] = first
        for key, deadline in found.items():
            heappush(self._heap, (deadline, key))
        return list(found)

    def audit(self) -> None:
        """Checks that every deadline is in the heap."""
        assert {key for deadline, key in self._heap if self._is_valid(deadline, key)} == self._by_key.keys()

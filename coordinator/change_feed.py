"""Change notification without polling."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from longleaf.errors import ResourceExhausted

T = TypeVar("T")
MAX_WATCHERS = 256
SECONDS_PER_WATCHER = 0.01
"""Minimum seconds between two updates, per watcher. One update takes a few tenths of a millisecond of loop time."""
RETRY_SECONDS = 5.0


class ChangeCounter:
    """Counts changes until the source has ended. Recording a change that has no waiter costs almost nothing."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def count(self) -> int:
        """Changes so far."""
        return self._count

    @property
    def is_over(self) -> bool:
        """Whether the source has ended, so that no change follows."""
        return self._over.is_set()

    def note(self) -> None:
        """Records a change."""
        self._count += 1
        self._changed.set()

    def end(self) -> None:
        """Ends the source and notifies all waiters."""
        self._over.set()
        self.note()

    async def after(self, count: int) -> None:
        """Returns once there are more than `count` changes, or the source has ended."""
        while self._count <= count:
            self._changed.clear()
            await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Sleeps, but returns early when the source ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


@dataclass(frozen=True)
class WatchState(Generic[T]):
    """The last observed value `seen`, the time of the observation, and the number of changes before it. If an
    observation equals the previous value, `seen` remains the same object."""

    count: int
    time: float
    seen: T


class CoalescingWatch(Generic[T]):
    """Shares the observations of `look` among at most `max_watchers` watchers. `clock` counts seconds.

    One observation serves all watchers. The minimum interval between two updates of a watcher is `spacing` seconds
    times the number of watchers, so the total cost does not grow with that number.
    """

    def __init__(
        self,
        look: Callable[[], T],
        changes: ChangeCounter,
        max_watchers: int = MAX_WATCHERS,
        spacing: float = SECONDS_PER_WATCHER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._changes = changes
        self._max_watchers = max_watchers
        self._spacing = spacing
        self._clock = clock
        self._num_watchers = 0
        self._sight: WatchState[T] | None = None

    @property
    def _interval(self) -> float:
        return self._num_watchers * self._spacing

    async def values(self, min_interval: float) -> AsyncGenerator[T, None]:
        """Yields the current value, then each different one, at most once per `min_interval` seconds. Raises
        ResourceExhausted, and the errors of `look`."""
        if self._num_watchers >= self._max_watchers:
            raise ResourceExhausted(
                "watchers", f"{self._max_watchers} watches are open, which is the limit", RETRY_SECONDS
            )
        self._num_watchers += 1
        try:
            shown: T | None = None
            while True:
                sight = self._latest()
                if sight.seen is not shown:
                    shown = sight.seen
                    yield shown
                await self._changes.pause(max(min_interval, self._interval))
                await self._changes.after(sight.count)
        finally:
            self._num_watchers -= 1

    def _latest(self) -> "WatchState[T]":
        last = self._sight
        if last is None or self._is_old(last):
            count, seen = self._changes.count, self._look()
            same = last.seen if last is not None and last.seen == seen else seen
            self._sight = last = WatchState(count, self._clock(), same)
        return last

    def _is_old(self, sight: "WatchState[T]") -> bool:
        is_due = self._changes.is_over or self._clock() - sight.time >= self._interval
        return self._changes.count > sight.count and is_due

"""Who waits for changes is woken by them: nothing is polled."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Changes:
    """Counts what changed, until it is over. Noting a change that nobody waits for costs next to nothing."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def count(self) -> int:
        """Changes so far."""
        return self._count

    def note(self) -> None:
        """Something has changed."""
        self._count += 1
        self._changed.set()

    def end(self) -> None:
        """Nothing will change any more: wakes all."""
        self._over.set()
        self.note()

    async def after(self, count: int) -> None:
        """Returns once there are more than `count` changes."""
        while self._count <= count:
            self._changed.clear()
            await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Waits, unless it is over or ends meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


async def watch(look: Callable[[], T], changes: Changes, min_interval: float) -> AsyncGenerator[T, None]:
    """What `look` sees now, and again when it sees something else; it looks once in `min_interval` seconds, and only
    after a change. Ends when `look` raises."""
    shown: T | None = None
    while True:
        count = changes.count
        seen = look()
        if seen != shown:
            shown = seen
            yield seen
        await changes.pause(min_interval)
        await changes.after(count)

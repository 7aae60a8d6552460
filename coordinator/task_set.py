"""Background tasks of one owner."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Running tasks. The set keeps them alive, because the event loop itself has only weak references to tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Iterates over a copy, so that tasks may start and end meanwhile."""
        return iter(list(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Waits for the running tasks, whose errors are ignored. If the caller is cancelled, they are cancelled."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancels the running tasks, and waits until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.wait()

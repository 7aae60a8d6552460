"""Storage for an event loop: calls block in separate threads."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import ParamSpec, TypeVar

from longleaf.daemon_threads import call_in_thread
from longleaf.errors import StorageUnavailable
from longleaf.storage.files import ObjectInfo
from longleaf.storage.store import Store

NUM_THREADS = 3
MAX_THREADS = 32
"""Includes calls whose callers stopped waiting, until the storage answers."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsyncStore:
    """As `Store`. A cancelled call may still complete, and process exit does not wait for it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._turns = asyncio.Semaphore(NUM_THREADS)
        self._counting = Lock()
        self.num_threads = 0
        """Calls that wait for the storage."""

    async def run(self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Runs a blocking call. Raises StorageUnavailable when too many calls have not returned."""
        async with self._turns:
            if self.num_threads >= MAX_THREADS:
                raise StorageUnavailable(f"{self.store.url}: {self.num_threads} calls have not returned")
            try:
                begun = call_in_thread(partial(call, *args, **kwargs))
            except RuntimeError as error:  # no more threads can be started
                raise StorageUnavailable(f"{self.store.url}: not called: {error}") from error
            self._count(1)
            begun.add_done_callback(lambda _: self._count(-1))
            return await asyncio.wrap_future(begun)

    def _count(self, more: int) -> None:
        with self._counting:
            self.num_threads += more

    async def put(self, name: str, content: bytes | bytearray, *, is_new: bool = False) -> None:
        await self.run(self.store.put, name, [content], is_new=is_new)

    async def get(self, name: str, digest: str | None = None) -> bytes:
        return await self.run(self.store.get, name, digest)

    async def size(self, name: str) -> int:
        return await self.run(self.store.size, name)

    async def list(self, folder: str) -> list[ObjectInfo]:
        return await self.run(lambda: list(self.store.list(folder)))

    async def delete(self, names: Sequence[str]) -> None:
        await self.run(self.store.delete, names)

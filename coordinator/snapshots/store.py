"""A storage for an event loop: calls wait in threads of their own, and keep nobody else waiting."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from longleaf.storage.files import Entry
from longleaf.storage.store import Store

NUM_THREADS = 3
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsyncStore:
    """As `Store`. A call that is cancelled may still be done."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="storage")

    async def run(self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls something that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args, **kwargs))

    async def put(self, name: str, content: bytes | bytearray, *, is_new: bool = False) -> None:
        await self.run(self.store.put, name, [content], is_new=is_new)

    async def get(self, name: str, digest: str | None = None) -> bytes:
        return await self.run(self.store.get, name, digest)

    async def size(self, name: str) -> int:
        return await self.run(self.store.size, name)

    async def list(self, folder: str) -> list[Entry]:
        return await self.run(lambda: list(self.store.list(folder)))

    async def delete(self, names: Sequence[str]) -> None:
        await self.run(self.store.delete, names)

    def close(self) -> None:
        """Waits for nobody: a storage may take its time."""
        self._threads.shutdown(wait=False, cancel_futures=True)

"""A storage for an event loop: calls wait in threads of their own, and keep nobody else waiting."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from longleaf.errors import Unavailable
from longleaf.storage.files import Entry
from longleaf.storage.store import Store

MAX_CALLS = 3
"""At a time, but for those that nobody waits for any more."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsyncStore:
    """As `Store`. A call that is cancelled may still be done."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._places = asyncio.Semaphore(MAX_CALLS)
        self._is_closed = False

    async def run(self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls something that blocks. Raises Unavailable at the end of the service."""
        async with self._places:
            if self._is_closed:
                raise Unavailable("the service is stopping")
            future = Future[Result]()
            work = partial(_call, future, partial(call, *args, **kwargs))
            # no end of a process waits for such a thread, as it would for one of an executor
            threading.Thread(target=work, name="storage", daemon=True).start()
            return await asyncio.wrap_future(future)

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
        self._is_closed = True


def _call(future: "Future[Result]", function: Callable[[], Result]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

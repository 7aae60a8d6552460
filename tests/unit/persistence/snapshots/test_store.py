"""The asynchronous store: its waiting threads are bounded, including those of abandoned calls."""

import _thread
import asyncio
import threading
from contextlib import suppress

import pytest

from coordinator.persistence.snapshots.store import MAX_THREADS, AsyncStore
from longleaf.errors import StorageUnavailable
from longleaf.storage.store import Store
from tests.support.coming import comes
from tests.support.fakes.storage import MemoryFiles

pytestmark = pytest.mark.timeout(60)


async def test_hanging_calls_are_bounded_and_further_calls_fail() -> None:
    store, gate, begun = AsyncStore(Store(MemoryFiles(), "memory")), threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        gate.wait()

    for _ in range(MAX_THREADS):
        call = asyncio.create_task(store.run(hang))
        await asyncio.to_thread(begun.acquire)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    with pytest.raises(StorageUnavailable, match=f"{MAX_THREADS} calls have not returned"):
        await store.run(hang)
    assert not begun.acquire(blocking=False)
    gate.set()
    await comes(lambda: store.num_threads == 0)
    await store.put("a", b"content")
    assert await store.get("a") == b"content"


async def test_failed_call_is_no_longer_counted() -> None:
    store = AsyncStore(Store(MemoryFiles(), "memory"))
    for _ in range(2 * MAX_THREADS):
        with pytest.raises(ZeroDivisionError):
            await store.run(lambda: 1 // 0)
    await comes(lambda: store.num_threads == 0)


async def test_call_without_a_thread_is_no_longer_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = AsyncStore(Store(MemoryFiles(), "memory"))

    def refuse(_function: object, _arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        for _ in range(MAX_THREADS):
            with pytest.raises(StorageUnavailable, match="can't start new thread"):
                await store.put("a", b"x")
    await store.put("a", b"content")

"""Waits until calls have ended on the server, which is later than the client's disconnect."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from coordinator.engine_messages import Event
from coordinator.telemetry.observers import CallRecord, EventSink


class OpenCalls:
    """An observer that counts open calls and generations. It is the first of several, so that the others have run
    before it.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    async def wait(self) -> None:
        """Returns when nothing is open."""
        await asyncio.wait_for(self._is_quiet.wait(), 10)

    @contextmanager
    def observe_call(self, record: CallRecord) -> Generator[None, None, None]:
        with self._open():
            yield

    @contextmanager
    def observe_generation(self, request_id: str, tenant: str) -> Generator[EventSink, None, None]:
        with self._open():
            yield _ignore

    @contextmanager
    def _open(self) -> Generator[None, None, None]:
        self._num_open += 1
        self._is_quiet.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_quiet.set()


def _ignore(_: Event) -> None:
    """Of a generation."""

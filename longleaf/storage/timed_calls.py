"""Timeouts for calls that may hang, by running them in separate threads."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Generic, TypeVar

from longleaf.formatting import human_seconds

Found = TypeVar("Found")
MAX_HANGING = 8
"""Maximum number of hanging calls per storage. Each keeps its thread and its buffers until the storage answers."""


class StorageTimeout(Exception):
    """A call exceeded its timeout, or was not started because too many calls hang."""


class TimedCall(Generic[Found]):
    """A running call."""

    def __init__(self, work: Callable[[], Found], timeout: float) -> None:
        self._future = Future[Found]()
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._work = work
        # a daemon thread does not block process exit
        self.thread = Thread(target=self._live, name="storage", daemon=True)
        self.thread.start()

    def result(self) -> Found:
        """The result or the exception of the call. Raises StorageTimeout."""
        wait([self._future], max(0.0, self._end - time.monotonic()))
        if not self._future.done():
            raise StorageTimeout(f"no answer within {human_seconds(self._timeout)}")
        return self._future.result()

    def _live(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:
            self._future.set_exception(error)


class TimedCalls:
    """Calls of one storage, each with a timeout in seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._hanging: list[Thread] = []

    def begin(self, work: Callable[[], Found]) -> TimedCall[Found]:
        """Raises StorageTimeout if too many calls hang already."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise StorageTimeout(f"{len(self._hanging)} earlier calls still have no answer")
        return TimedCall(work, self._timeout)

    def end(self, call: TimedCall[Found]) -> Found:
        """The result or the exception of the call. Raises StorageTimeout."""
        try:
            return call.result()
        except StorageTimeout:
            self._hanging.append(call.thread)
            raise

"""Calls that may hang, on threads of their own, and waited for no longer than they may take."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Generic, TypeVar

from longleaf.formatting import human_seconds

Found = TypeVar("Found")
MAX_HANGING = 8
"""Calls of one storage that hang: each keeps its thread, and what it would write, until the storage answers."""


class StorageTimeout(Exception):
    """A call is not over after all the time that it had, or none is begun because too many hang."""


class TimedCall(Generic[Found]):
    """A call that was begun."""

    def __init__(self, work: Callable[[], Found], timeout: float) -> None:
        self._future = Future[Found]()
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._work = work
        # nobody waits for such a thread when the process ends
        self.thread = Thread(target=self._live, name="storage", daemon=True)
        self.thread.start()

    def result(self) -> Found:
        """What the call returned or raised. Raises StorageTimeout."""
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
    """Calls of one storage, each of `timeout` seconds at most."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._hanging: list[Thread] = []

    def begin(self, work: Callable[[], Found]) -> TimedCall[Found]:
        """Raises StorageTimeout where too many calls hang already."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise StorageTimeout(f"{len(self._hanging)} earlier calls still have no answer")
        return TimedCall(work, self._timeout)

    def end(self, call: TimedCall[Found]) -> Found:
        """What the call returned or raised. Raises StorageTimeout."""
        try:
            return call.result()
        except StorageTimeout:
            self._hanging.append(call.thread)
            raise

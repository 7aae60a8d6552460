"""Timeouts for calls that may hang, by running them in separate threads."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, NamedTuple, TypeVar

from longleaf.daemon_threads import call_in_thread
from longleaf.formatting import human_seconds

Found = TypeVar("Found")
MAX_HANGING = 8
"""Maximum number of hanging calls per storage. Each keeps its thread and its buffers until the storage answers."""


class StorageTimeout(Exception):
    """A call exceeded its timeout, or was not started because too many calls hang."""


class TimedCall(NamedTuple, Generic[Found]):
    """A running call."""

    future: Future[Found]
    deadline: float
    """On the monotonic clock."""


class TimedCalls:
    """Calls of one storage, each with a timeout in seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._hanging: list[Future[Any]] = []

    def begin(self, work: Callable[[], Found]) -> TimedCall[Found]:
        """Raises StorageTimeout if too many calls hang already."""
        self._hanging = [call for call in self._hanging if not call.done()]
        if len(self._hanging) >= MAX_HANGING:
            raise StorageTimeout(f"{len(self._hanging)} earlier calls still have no answer")
        return TimedCall(call_in_thread(work), time.monotonic() + self._timeout)

    def end(self, call: TimedCall[Found]) -> Found:
        """The result or the exception of the call. Raises StorageTimeout."""
        wait([call.future], max(0.0, call.deadline - time.monotonic()))
        if not call.future.done():
            if not call.future.cancel():  # it runs; else its thread died before, for lack of memory
                self._hanging.append(call.future)
            raise StorageTimeout(f"no answer within {human_seconds(self._timeout)}")
        return call.future.result()

"""Throttles failed authentication, which slows down guessing."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

FREE_PER_SECOND = 50
"""Failures per second that are not delayed, so that misconfigured clients get the error immediately."""
WAIT_SECONDS = 1.0
MAX_WAITING = 256
"""Most failed calls that are delayed concurrently; further ones are ended immediately, because each takes memory."""


class AuthFailureThrottle:
    """Counts the failures of the current second. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0.0
        self._num_refused = 0
        self._num_waiting = 0

    def record_failure(self) -> float:
        """Records a failure and returns its delay in seconds."""
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._num_refused = now, 0
        self._num_refused += 1
        is_flood = self._num_refused > FREE_PER_SECOND
        return WAIT_SECONDS if is_flood and self._num_waiting < MAX_WAITING else 0.0

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Context manager for the delay of one call."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

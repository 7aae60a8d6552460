"""How fast strangers are refused: those who guess are kept waiting."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

FREE_PER_SECOND = 50
"""Refusals a second at which nobody is kept waiting: clients that were set up wrongly learn so at once."""
WAIT_SECONDS = 1.0
MAX_WAITING = 256
"""Refused calls that are kept waiting; further ones are ended at once, for each takes memory."""


class AuthFailureThrottle:
    """Refused calls of the last second. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0.0
        self._num_refused = 0
        self._num_waiting = 0

    def note(self) -> float:
        """Another one; says how many seconds it is kept waiting."""
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._num_refused = now, 0
        self._num_refused += 1
        is_flood = self._num_refused > FREE_PER_SECOND
        return WAIT_SECONDS if is_flood and self._num_waiting < MAX_WAITING else 0.0

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """The time in which one is kept waiting."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

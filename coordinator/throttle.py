"""Rate limit for log lines, with a count of the omitted ones."""

import math
import time
from collections.abc import Callable


class Throttle:
    """Admits `burst` events at once, then one per `interval` seconds, and counts the others. `clock` returns
    seconds."""

    def __init__(self, interval: float, burst: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._slack = (burst - 1) * interval
        self._next = -math.inf
        """The time of the next event without a burst."""
        self.num_dropped = 0
        """Events that were not admitted since the last `pop_num_dropped`."""

    def admit(self) -> bool:
        now = self._clock()
        if now < self._next - self._slack:
            self.num_dropped += 1
            return False
        self._next = max(self._next, now) + self._interval
        return True

    def record_dropped(self, count: int) -> None:
        """Counts events that were dropped before they reached this throttle."""
        self.num_dropped += count

    def pop_num_dropped(self) -> int:
        num_dropped, self.num_dropped = self.num_dropped, 0
        return num_dropped

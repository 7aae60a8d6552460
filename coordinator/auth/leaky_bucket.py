"""A leaky bucket: the rate limit for quotas per minute."""

from collections.abc import Callable

MINUTE = 60.0


class LeakyBucket:
    """The level falls at the allowed rate. While the level is at most one minute's worth, an amount of any size is
    accepted; after a larger one, callers wait until the level has fallen. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level = 0.0
        self._time = clock()

    def add(self, amount: int, rate: int | None) -> None:
        """Adds `amount`, at `rate` per minute. None: no limit, and the level is reset."""
        if rate is None:
            self._level = 0.0
        else:
            self._leak(rate)
            self._level += amount

    def seconds_until_free(self, rate: int) -> float:
        """Seconds until the next amount is accepted, at `rate` per minute, which must not be 0; 0.0 if it is accepted
        now."""
        self._leak(rate)
        return max(0.0, (self._level - rate) * MINUTE / rate)

    def _leak(self, rate: int) -> None:
        now = self._clock()
        self._level = max(0.0, self._level - (now - self._time) * rate / MINUTE)
        self._time = now

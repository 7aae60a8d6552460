"""A leaky bucket: what was taken of a quota per minute."""

from collections.abc import Callable

MINUTE = 60.0


class LeakyBucket:
    """What was taken leaks out at the rate that is allowed. While no more than a minute's worth is in it, any amount
    may be taken: so what is larger than that passes as well, and is waited for afterwards. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level = 0.0
        self._time = clock()

    def take(self, amount: int, rate: int | None) -> None:
        """Counts, at `rate` per minute; None: nothing is kept count of."""
        if rate is None:
            self._level = 0.0
        else:
            self._leak(rate)
            self._level += amount

    def seconds_until_free(self, rate: int) -> float:
        """0.0 when something may be taken now, at `rate` per minute, which is not 0."""
        self._leak(rate)
        return max(0.0, (self._level - rate) * MINUTE / rate)

    def _leak(self, rate: int) -> None:
        now = self._clock()
        self._level = max(0.0, self._level - (now - self._time) * rate / MINUTE)
        self._time = now

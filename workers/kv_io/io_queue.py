"""A queue of I/O orders for worker threads."""

import threading
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]
Clock = Callable[[], float]


class IoQueue:
    """A queue that returns fetches before saves, because callers wait for fetches. Saves can be paused.
    Thread-safe.
    """

    def __init__(self, clock: Clock = time.monotonic, pause: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` counts seconds. After a save is taken, the next one is held back for `pause()` seconds, or as long as
        `rest` specifies.
        """
        self._clock = clock
        self._pause = pause
        self._fetches: deque[Work] = deque()
        self._saves: deque[Work] = deque()
        self._rested = 0.0
        """The time at which saves resume."""
        self._is_closed = False
        self._changed = threading.Condition()

    def put_fetch(self, work: Work) -> None:
        self._put(self._fetches, work)

    def put_save(self, work: Work) -> None:
        self._put(self._saves, work)

    def _put(self, orders: deque[Work], work: Work) -> None:
        with self._changed:
            orders.append(work)
            self._changed.notify()

    def rest(self, seconds: float) -> None:
        """Pauses saves for `seconds`. The last call takes precedence."""
        with self._changed:
            self._rested = self._clock() + seconds
            self._changed.notify()

    def close(self) -> None:
        """Drops queued orders. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> Work | None:
        """Waits for the next order. Returns None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                if self._fetches:
                    return self._fetches.popleft()
                rest = self._rested - self._clock()
                if self._saves and rest <= 0:
                    self._rested = self._clock() + self._pause()
                    return self._saves.popleft()
                self._changed.wait(rest if self._saves else None)
        return None

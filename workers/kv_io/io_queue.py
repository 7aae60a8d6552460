"""Orders that wait to be carried out by some threads."""

import threading
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]
Clock = Callable[[], float]


class IoQueue:
    """A queue where fetches go before saves, since somebody waits for them, and where saves may have to rest. Any
    thread may call."""

    def __init__(self, clock: Clock = time.monotonic, pause: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` counts seconds. `pause` tells how many of them other saves wait once one is taken, unless `rest` says
        something else meanwhile."""
        self._clock = clock
        self._pause = pause
        self._fetches: deque[Work] = deque()
        self._saves: deque[Work] = deque()
        self._rested = 0.0
        """When saves go on."""
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
        """No save is taken for so long. What was said last counts."""
        with self._changed:
            self._rested = self._clock() + seconds
            self._changed.notify()

    def close(self) -> None:
        """What waits is dropped. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> Work | None:
        """Waits for the next one; None: there is none any more."""
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

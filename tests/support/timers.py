"""Calls to come, on a clock that a test moves."""

from collections.abc import Callable


class Handle:
    """One of the calls."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """Implements coordinator.handlers.resumable_sessions.CallLater."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, Callable[[], None], Handle]] = []

    def __call__(self, seconds: float, function: Callable[[], None]) -> Handle:
        handle = Handle()
        self._calls.append((self.now + seconds, function, handle))
        return handle

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [call for call in self._calls if call[0] <= self.now]
        self._calls = [call for call in self._calls if call[0] > self.now]
        for _, function, handle in due:
            if not handle.is_cancelled:
                function()

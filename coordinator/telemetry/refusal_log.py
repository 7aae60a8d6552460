"""Which refused calls are told one by one, and that a flood of them is told as a number."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context

FIRST_PER_HOST = 5
"""Refused calls of a host that are told by themselves, each minute: enough to see who is set up wrongly."""
MAX_HOSTS = 20
"""Hosts of which any are, each minute: an attacker may have as many addresses as it likes."""
MINUTE = 60.0
COUNT_SECONDS = 1.0
"""How often the number of the others is told, at most."""

Later = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
"""Calls something after so many seconds."""


def call_later(seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """By the running event loop, and not as part of the call for which code runs."""
    return asyncio.get_running_loop().call_later(seconds, callback, context=Context())


class RefusalLog:
    """Refused calls. Those that are not told by themselves go to `tell` as a number, every second at most."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float], later: Later) -> None:
        self._tell, self._clock, self._later = tell, clock, later
        self._began = clock()
        self._told = Counter[str]()
        """Calls told by themselves in this minute, by host."""
        self._codes = Counter[str]()
        """Those that were not told yet."""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, host: str, code: str) -> bool:
        """Another one; whether it is to be told by itself."""
        now = self._clock()
        if now - self._began >= MINUTE:
            self._began = now
            self._told.clear()
        is_known = host in self._told or len(self._told) < MAX_HOSTS
        if is_known and self._told[host] < FIRST_PER_HOST:
            self._told[host] += 1
            return True
        self._codes[code] += 1
        if self._timer is None:
            self._timer = self._later(COUNT_SECONDS, self._say)
        return False

    def _say(self) -> None:
        self._timer = None
        counts = ", ".join(f"{count:,} with {code}" for code, count in sorted(self._codes.items()))
        self._codes.clear()
        self._tell(f"further calls were refused: {counts}")

    def stop(self) -> None:
        """Tells of those that were not told yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._say()

"""Rate limit for the log of refused calls: single entries first, then only counts."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context

FIRST_PER_HOST = 5
"""Refused calls of one host that are logged individually per minute, which suffices to find a misconfigured client."""
MAX_HOSTS = 20
"""Hosts whose refused calls are logged individually per minute: an attacker may have any number of addresses."""
MINUTE = 60.0
COUNT_SECONDS = 1.0
"""Minimum interval in seconds between logs of the count of the other calls."""

Later = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
"""Calls a function after the given number of seconds."""


def call_later(seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """Schedule on the running event loop, outside the context of the current call."""
    return asyncio.get_running_loop().call_later(seconds, callback, context=Context())


class RefusalLog:
    """Refused calls. The number of those that are not logged individually is passed to `log`, at most once per
    second."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float], later: Later) -> None:
        self._log, self._clock, self._later = log, clock, later
        self._began = clock()
        self._logged = Counter[str]()
        """Calls logged individually in this minute, by host."""
        self._codes = Counter[str]()
        """Calls not reported yet, by code."""
        self._timer: asyncio.TimerHandle | None = None

    def record(self, host: str, code: str) -> bool:
        """Count a refused call; return whether to log it individually."""
        now = self._clock()
        if now - self._began >= MINUTE:
            self._began = now
            self._logged.clear()
        is_known = host in self._logged or len(self._logged) < MAX_HOSTS
        if is_known and self._logged[host] < FIRST_PER_HOST:
            self._logged[host] += 1
            return True
        self._codes[code] += 1
        if self._timer is None:
            self._timer = self._later(COUNT_SECONDS, self._log_summary)
        return False

    def _log_summary(self) -> None:
        self._timer = None
        counts = ", ".join(f"{count:,} with {code}" for code, count in sorted(self._codes.items()))
        self._codes.clear()
        self._log(f"further calls were refused: {counts}")

    def stop(self) -> None:
        """Report the calls not reported yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._log_summary()

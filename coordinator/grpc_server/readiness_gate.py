"""Admits calls while the service is ready: after the model is loaded and before shutdown."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from coordinator.handlers.application import Application
from longleaf.errors import LongleafError, Unavailable

SERVED = "/longleaf.v1."
"""Prefix of the methods that need the model. All others, such as health checks, are always accepted."""
DRAIN = f"{SERVED}ClusterService/Drain"
ENDLESS = f"{SERVED}ClusterService/WatchCluster"


class ReadinessGate:
    """Accepts calls to the model from `open` to `close`, and counts running ones. Before `open`, calls get the error
    that `loading` returns."""

    def __init__(self, loading: Callable[[], LongleafError]) -> None:
        self._why_not: Callable[[], LongleafError] | None = loading
        self._use_cases: Application | None = None
        self._is_closed = False
        self._reason: LongleafError | None = None
        self._open = set[asyncio.Task[Any] | None]()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        return self._why_not is None

    @property
    def num_open(self) -> int:
        """Running calls, except for watches, which do not end without the client."""
        return len(self._open)

    @property
    def use_cases(self) -> Application:
        """The use cases that serve accepted calls."""
        assert self._use_cases is not None
        return self._use_cases

    def open(self, use_cases: Application) -> None:
        """Accepts calls, unless the gate is closed."""
        if not self._is_closed:
            self._why_not, self._use_cases = None, use_cases

    def close(self, error: Unavailable) -> None:
        """Rejects new calls with `error`. Running calls continue."""
        self._why_not, self._is_closed = lambda: error, True

    @contextmanager
    def enter(self, method: str) -> Generator[None, None, None]:
        """Wraps one call. Raises the reason if the service does not accept it."""
        if method == DRAIN or not method.startswith(SERVED):
            yield
            return
        if self._why_not is not None:
            raise self._why_not()
        if method == ENDLESS:
            yield
            return
        call = asyncio.current_task()
        self._open.add(call)
        self._empty.clear()
        try:
            yield
        except asyncio.CancelledError:
            if self._reason is None or call is None:
                raise
            call.uncancel()
            raise self._reason from None
        finally:
            self._open.discard(call)
            if not self._open:
                self._empty.set()

    def end(self, error: Unavailable) -> None:
        """Ends all running calls with `error`, in any state."""
        self._reason = error
        for call in self._open:
            if call is not None:
                call.cancel()

    async def wait_empty(self, seconds: float) -> None:
        """Returns when no call is running, after at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()

"""Limits calls that need no authentication: health checks and reflection.

Few such calls are open, and a new one replaces the oldest. Clients that hold calls open therefore cannot block others,
and take no capacity from calls to the model.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from coordinator.grpc_server.request_limiter import Handler, RequestLimiter, RequestReader
from longleaf.errors import ResourceExhausted

MAX_CALLS = 256
ARRIVAL_SECONDS = 10.0
"""Seconds within which the request of such a call must arrive."""
RETRY_SECONDS = 1.0


class UnauthenticatedCallLimiter:
    """Allows at most `max_calls` unary calls, and as many streams."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        # Calls count here as well; a replaced call ends only in the next iteration of the loop.
        self._gate = RequestLimiter(4 * max_calls, arrival_seconds=ARRIVAL_SECONDS, share=1.0)
        self._open: dict[bool, dict[asyncio.Task[Any], None]] = {False: {}, True: {}}
        """Calls, by whether they stream, the oldest first."""

    @contextmanager
    def of(self, method: str, handler: Handler, host: str) -> Generator[RequestReader, None, None]:
        """Counts a call from `host` while the body runs, and yields the reader of its requests. Raises
        ResourceExhausted, in the body too when newer calls replace this one."""
        task = asyncio.current_task()
        assert task is not None
        alike = self._open[bool(handler.response_streaming)]
        if len(alike) >= self._max_calls:
            oldest = next(iter(alike))
            del alike[oldest]
            oldest.cancel()
        alike[task] = None
        try:
            with self._gate.of(method, handler, host) as incoming:
                yield incoming
        except asyncio.CancelledError:
            if task in alike:
                raise
            task.uncancel()
            raise ResourceExhausted(
                "calls", "too many unauthenticated calls: the oldest was closed", RETRY_SECONDS
            ) from None
        finally:
            alike.pop(task, None)

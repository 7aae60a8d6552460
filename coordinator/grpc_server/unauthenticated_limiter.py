"""Calls that anybody may make without being asked who they are: health checks and reflection.

There are few at a time, and who came first gives way to who comes next: so strangers who hold theirs open keep nobody
else from being answered, and take nothing of the room that calls to the model have.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from coordinator.grpc_server.request_limiter import Handler, RequestLimiter, RequestReader
from longleaf.errors import ResourceExhausted

MAX_CALLS = 256
ARRIVAL_SECONDS = 10.0
"""How long the request of such a call may be on its way."""
RETRY_SECONDS = 1.0


class UnauthenticatedCallLimiter:
    """Holds at most `max_calls` that answer once, and as many that stream."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        # They are counted here; a call that gives way is gone one turn of the loop later.
        self._gate = RequestLimiter(4 * max_calls, arrival_seconds=ARRIVAL_SECONDS, share=1.0)
        self._open: dict[bool, dict[asyncio.Task[Any], None]] = {False: {}, True: {}}
        """Calls, by whether they stream, the oldest first."""

    @contextmanager
    def of(self, method: str, handler: Handler, host: str) -> Generator[RequestReader, None, None]:
        """The requests of one call from `host`, which is open meanwhile. Raises ResourceExhausted, also later, when
        others came."""
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
            raise ResourceExhausted("calls", "others came, for whom this one gives way", RETRY_SECONDS) from None
        finally:
            alike.pop(task, None)

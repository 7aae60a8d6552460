"""Name of the served model."""

import time

from starlette.requests import Request

from gateway.callers import with_deadline
from longleaf.client import AsyncClient

KNOWN_SECONDS = 1.0
"""Lifetime of a cached name, because another service may start at the same address."""
MAX_CALLERS = 1024


class ModelNameCache:
    """The last known model name per caller, since only authenticated callers may see it."""

    def __init__(self) -> None:
        self._reported = dict[int, tuple[str, float]]()

    def record(self, caller: int, name: str) -> None:
        if len(self._reported) >= MAX_CALLERS:
            self._reported.clear()
        self._reported[caller] = name, time.monotonic()

    def name_for(self, caller: int) -> str | None:
        """None if the service must be asked."""
        name, reported_at = self._reported.get(caller, (None, 0.0))
        return name if time.monotonic() - reported_at < KNOWN_SECONDS else None


async def model_name(request: Request, client: AsyncClient) -> str:
    """The model name from the service, which authenticates the caller."""
    known: ModelNameCache = request.app.state.model
    caller = hash(request.headers.get("authorization"))  # a hash, because credentials are not stored
    name = known.name_for(caller)
    if name is None:
        name = (await with_deadline(client.cluster())).model.name
        known.record(caller, name)
    return name

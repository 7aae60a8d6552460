"""What the served model is called."""

import time

from starlette.requests import Request

from door.callers import in_time
from longleaf.client import AsyncClient

KNOWN_SECONDS = 1.0
"""How long its name is taken to be the same: another service may be behind the same address by then."""
MAX_CALLERS = 1024


class ModelNameCache:
    """The name that the service told last, to each caller: whom it does not let in is not told it here either."""

    def __init__(self) -> None:
        self._told = dict[int, tuple[str, float]]()

    def note(self, caller: int, name: str) -> None:
        if len(self._told) >= MAX_CALLERS:
            self._told.clear()
        self._told[caller] = name, time.monotonic()

    def name_for(self, caller: int) -> str | None:
        """None where the service is to be asked."""
        name, reported = self._told.get(caller, (None, 0.0))
        return name if time.monotonic() - reported < KNOWN_SECONDS else None


async def model_name(request: Request, client: AsyncClient) -> str:
    """As the service says, which lets this caller in."""
    known: ModelNameCache = request.app.state.model
    caller = hash(request.headers.get("authorization"))  # it stands for a credential, which is not kept
    name = known.name_for(caller)
    if name is None:
        name = (await in_time(client.cluster())).model.name
        known.note(caller, name)
    return name

"""What the served model is called."""

import time

from starlette.requests import Request

from longleaf.client import AsyncClient

KNOWN_SECONDS = 1.0
"""How long its name is taken to be the same: another service may be behind the same address by then."""


class KnownModel:
    """The name that the service told last."""

    def __init__(self) -> None:
        self.name, self._told = "", 0.0

    def note(self, name: str) -> None:
        self.name, self._told = name, time.monotonic()

    @property
    def is_fresh(self) -> bool:
        return bool(self.name) and time.monotonic() - self._told < KNOWN_SECONDS


async def model_name(request: Request, client: AsyncClient) -> str:
    """As the service says, which lets this caller in."""
    known: KnownModel = request.app.state.model
    if not known.is_fresh:
        known.note((await client.cluster()).model.name)
    return known.name

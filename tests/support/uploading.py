"""An ingest that ends on request."""

import asyncio
from collections.abc import AsyncIterator

from longleaf.client import AsyncClient
from longleaf.types import Context

WORDS = b"Call me Ishmael. "


class Upload:
    """An ingest under way: the service has asked for its document, of which a part has come. `task` ends with it."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._rest = asyncio.Event()
        self._has_begun = asyncio.Event()
        self.task: asyncio.Task[Context] = asyncio.create_task(client.ingest(name, self._document()))

    async def _document(self) -> AsyncIterator[bytes]:
        yield WORDS
        self._has_begun.set()
        await self._rest.wait()
        yield WORDS

    async def begin(self) -> "Upload":
        """Returns once it is under way."""
        await self._has_begun.wait()
        return self

    def finish(self) -> None:
        """Sends the rest of the document."""
        self._rest.set()

"""A client for those that hand on the calls of others."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from longleaf import codec
from longleaf.client.aio import AsyncClient
from longleaf.client.calls import Calls
from longleaf.client.upload import Pieces, UploadStream, ingest_piece, place_of, upload
from longleaf.types import IngestHeader, IngestProgress


class ProxyClient(AsyncClient):
    """Calls as many, over one connection, and keeps nothing of what it hands on. Its errors do not tell the address of
    the service: they are for others."""

    def bearing(self, credential: str) -> "ProxyClient":
        """A view of this client whose calls bear another credential, over the same connection. It is cheap, and to be
        used as long as this client is open: closing the view closes nothing. Raises InvalidArgument for what is no
        credential, and for one that would travel in plain text."""
        return _View(self.server, self._calls.bearing(credential))

    def _attach(self, calls: Calls) -> None:
        calls.called = "the service"
        super()._attach(calls)

    async def ingest_once(self, header: IngestHeader, pieces: Pieces) -> AsyncGenerator[IngestProgress, None]:
        """One stream of an ingest, made once: it sends what `pieces` gives from where the service wants it, and does
        not go on when it breaks."""
        sending = UploadStream(codec.encode_ingest_piece(header), pieces, ingest_piece, place_of)
        steps = upload(self._calls, self._contexts.IngestContext, sending, codec.decode_ingest_progress, None)
        async with aclosing(steps):
            async for progress in steps:
                yield progress


class _View(ProxyClient):
    """A client over the connection of another one."""

    def __init__(self, server: str, calls: Calls) -> None:
        self.server = server
        self._attach(calls)

    async def close(self) -> None:
        """The connection is the other one's."""

"""A client for gateways, which forward the calls of their own clients."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from longleaf import codec
from longleaf.client.aio import AsyncClient
from longleaf.client.calls import Calls
from longleaf.client.upload import Pieces, UploadStream, ingest_piece, place_of, upload
from longleaf.types import IngestHeader, IngestProgress


class ProxyClient(AsyncClient):
    """Makes calls on behalf of many callers over one connection, and keeps no state about the callers. Its errors omit
    the address of the service, because callers see them."""

    _called = "the service"

    def with_credential(self, credential: str) -> "ProxyClient":
        """A view that sends another credential over the same connection. It is cheap, and valid while this client
        is open. Closing it does nothing. Raises InvalidArgument for a malformed credential, and for one that would be
        sent in plain text."""
        return _View(self.server, self._calls.with_credential(credential))

    async def ingest_once(self, header: IngestHeader, pieces: Pieces) -> AsyncGenerator[IngestProgress, None]:
        """A single stream of an ingest, which sends `pieces` from the offset that the service requests. It is neither
        retried nor resumed."""
        sending = UploadStream(codec.encode_ingest_piece(header), pieces, ingest_piece, place_of)
        steps = upload(self._calls, self._contexts.IngestContext, sending, codec.decode_ingest_progress, None)
        async with aclosing(steps):
            async for progress in steps:
                yield progress


class _View(ProxyClient):
    """A view on another client's connection."""

    def __init__(self, server: str, calls: Calls) -> None:
        self.server = server
        self._attach(calls)

    async def close(self) -> None:
        """Does nothing: the connection belongs to the other client."""

"""The upward half of an ingest's stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from longleaf import codec
from longleaf.client.documents import Document, Source, size_of
from longleaf.errors import InvalidArgument
from longleaf.messages import (
    ContextOptions,
    ContextSettings,
    IngestHeader,
    IngestOptions,
    IngestPiece,
    IngestProgress,
)
from longleaf.v1 import context_service_pb2 as ingest_pb


def header_of(context: str, document: Document, options: IngestOptions) -> IngestHeader:
    """What an ingest begins with. Raises TypeError for an option that there is not."""
    own = {"append", "upload_id", "priority", "client", "timeout"}
    settings = cast(ContextOptions, {name: value for name, value in options.items() if name not in own})
    return IngestHeader(
        context,
        options.get("append", False),
        size_of(document),
        options.get("upload_id", ""),
        ContextSettings(**settings),
        priority=options.get("priority", 0),
        client=options.get("client", ""),
    )


def reach_of(progress: IngestProgress) -> int:
    """A number that grows with what the service has done."""
    return progress.received_bytes + progress.received_tokens + progress.processed


class Sending:
    """The header, and once the service answered it, the document from where the service wants it."""

    def __init__(self, header: IngestHeader, source: Source) -> None:
        """Raises InvalidArgument when a setting does not fit its field."""
        self._header = codec.encode_ingest_piece(header)
        self._source = source
        self._offset: int | None = None
        self._is_welcome = asyncio.Event()
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """The service has asked for the document."""
        return self._offset is not None

    @property
    def error(self) -> Exception | None:
        """What went wrong in the document's source."""
        return self._source.error

    def take(self, progress: IngestProgress) -> None:
        """The service's answer; what it has already need not be kept."""
        offset = progress.received_bytes or progress.received_tokens  # token ids have no bytes
        if self._offset is None:
            self._offset = offset
            self._is_over = progress.phase not in ("receiving", "unspecified")
            self._is_welcome.set()
        self._source.acknowledge(offset)

    def stop(self) -> None:
        """The call has ended: what waits to send must not wait on."""
        self._is_over = True
        self._is_welcome.set()

    async def requests(self) -> AsyncIterator[ingest_pb.IngestContextRequest]:
        yield self._header
        await self._is_welcome.wait()  # a refused name or size costs no upload
        if self._is_over:
            return
        async for piece in self._source.pieces_from(self._offset or 0):
            yield self._encoded(piece)

    def _encoded(self, piece: IngestPiece) -> ingest_pb.IngestContextRequest:
        try:
            return codec.encode_ingest_piece(piece)
        except InvalidArgument as error:
            self._source.error = error
            raise

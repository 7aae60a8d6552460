"""Bidirectional upload streams: document pieces up, progress down."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc

from longleaf import codec
from longleaf.client.calls import CallOutcome, Calls
from longleaf.client.documents import Document, UploadSource, size_of
from longleaf.client.files import files_of
from longleaf.errors import InvalidArgument, LongleafError
from longleaf.types import (
    ContextOptions,
    ContextSettings,
    IngestHeader,
    IngestOptions,
    IngestPiece,
    IngestProgress,
)

ProgressT = TypeVar("ProgressT")


class Pieces(Protocol):
    """A document that is sent from the offset that the service requests."""

    @property
    def error(self) -> Exception | None:
        """The error of the document's source. A call whose request stream fails does not report it."""
        ...

    @error.setter
    def error(self, error: Exception) -> None: ...

    def pieces_from(self, offset: int) -> AsyncIterator[IngestPiece]: ...

    def acknowledge(self, offset: int) -> None:
        """Records that the service has all data before `offset`."""
        ...


def header_of(context: str, document: Document, options: IngestOptions) -> IngestHeader:
    """The first message of an ingest. Raises TypeError for an unknown option."""
    own = {"append", "upload_id", "system", "priority", "client", "timeout"}
    settings = cast(ContextOptions, {name: value for name, value in options.items() if name not in own})
    return IngestHeader(
        context,
        options.get("append", False),
        size_of(document),
        options.get("upload_id", ""),
        ContextSettings(**settings),
        options.get("system", ""),
        priority=options.get("priority", 0),
        client=options.get("client", ""),
        files=files_of(document),
    )


def ingest_of(header: IngestHeader, source: UploadSource) -> "UploadStream[IngestProgress]":
    """Raises InvalidArgument if a setting does not fit its field."""
    return UploadStream(codec.encode_ingest_piece(header), source, ingest_piece, place_of)


def ingest_piece(piece: IngestPiece, offset: int) -> object:
    """The request that carries a piece."""
    del offset  # the service counts
    return codec.encode_ingest_piece(piece)


def place_of(progress: IngestProgress) -> tuple[int, bool]:
    """The offset up to which the service has the document, and whether it accepts more."""
    offset = progress.received_bytes or progress.received_tokens  # token ids have no bytes
    return offset, progress.phase in ("receiving", "unspecified")


def reach_of(progress: IngestProgress) -> int:
    """A number that increases with the progress of the service."""
    return progress.received_bytes + progress.received_tokens + progress.processed


class UploadStream(Generic[ProgressT]):
    """Sends the first request and, after the service's first response, the document from the requested offset."""

    def __init__(
        self,
        first: object,
        source: Pieces,
        encode: Callable[[IngestPiece, int], object],
        place_of: Callable[[ProgressT], tuple[int, bool]],
    ) -> None:
        """`encode` makes a request of a piece at an offset. `place_of` returns the offset up to which the service has
        the document, and whether it accepts more."""
        self._first = first
        self._source = source
        self._encode = encode
        self._place_of = place_of
        self._offset: int | None = None
        self._may_send = asyncio.Event()
        self._is_over = False

    @property
    def error(self) -> Exception | None:
        """The error of the document's source."""
        return self._source.error

    def on_progress(self, progress: ProgressT) -> None:
        """Processes a response of the service, and releases the acknowledged pieces."""
        place, takes_more = self._place_of(progress)
        if self._offset is None:
            self._offset, self._is_over = place, not takes_more
            self._may_send.set()
        self._source.acknowledge(place)

    def stop(self) -> None:
        """Ends a sender that waits, after the call has ended."""
        self._is_over = True
        self._may_send.set()

    async def requests(self) -> AsyncIterator[object]:
        yield self._first
        await self._may_send.wait()  # nothing is uploaded if the name or the size is refused
        if self._is_over:
            return
        offset = self._offset or 0
        async for piece in self._source.pieces_from(offset):
            yield self._encoded(piece, offset)
            offset += len(cast(Sequence[int] | bytes, piece))

    def _encoded(self, piece: IngestPiece, offset: int) -> object:
        try:
            return self._encode(piece, offset)
        except InvalidArgument as error:
            self._source.error = error
            raise


async def upload(
    calls: Calls,
    method: Any,
    sending: UploadStream[ProgressT],
    decode: Callable[[Any], ProgressT],
    timeout: float | None,
) -> AsyncGenerator[ProgressT, None]:
    """One stream to `method`, sending from the requested offset; yields the responses."""
    with calls.typed():
        call = method(sending.requests(), timeout=timeout)
    try:
        with calls.typed():
            ending = CallOutcome(call)
            try:
                async for response in call:
                    progress = calls.decoded(decode, response)
                    sending.on_progress(progress)
                    yield progress
            except grpc.RpcError as error:
                raise await ending.error(error) from None
    except LongleafError:
        if sending.error is not None:  # the call reports only that its request stream failed
            raise sending.error from None
        raise
    finally:
        sending.stop()
        call.cancel()

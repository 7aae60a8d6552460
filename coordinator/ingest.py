"""An ingest from its first piece to its acknowledged context."""

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from coordinator import events
from coordinator.generation import EventStream, check_ids
from coordinator.text_limit import Capacity, TextLimit
from coordinator.tokenizer import Tokenizer
from coordinator.wire import context_of
from longleaf.errors import AlreadyExists, InvalidArgument, NotFound
from longleaf.messages import IngestHeader, IngestPiece, IngestProgress

REPORT_BYTES = 1 << 18
"""Received bytes between two reports."""


class Ingester(Capacity, Protocol):
    """The engine, as ingests see it."""

    def ingest(self, context: str, token_ids: Sequence[int], *, append: bool) -> EventStream:
        """Raises AlreadyExists, NotFound, InvalidArgument, ResourceExhausted or Unavailable."""
        ...


class Ingest:
    """Runs ingests on an engine. `clock` counts seconds."""

    def __init__(self, engine: Ingester, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock

    async def run(self, pieces: AsyncIterator[IngestPiece]) -> AsyncGenerator[IngestProgress, None]:
        """Progress, the last with the context. Closing the iterator gives the ingest up and leaves nothing behind.

        Raises InvalidArgument, NotFound, AlreadyExists, ResourceExhausted, Unavailable or WorkerLost.
        """
        header = await anext(pieces, None)
        if not isinstance(header, IngestHeader):
            raise InvalidArgument("config", "must be in the first request, and only there")
        document = Document(self._limit(header))
        document.expect(header.total_bytes)
        yield IngestProgress(phase="receiving")
        reported = 0
        async for piece in pieces:
            document.add(piece)
            if document.num_bytes - reported >= REPORT_BYTES:
                reported = document.num_bytes
                yield IngestProgress(phase="receiving", received_bytes=reported)
        document.finish()
        yield IngestProgress(phase="tokenizing", received_bytes=document.num_bytes)
        token_ids = await asyncio.to_thread(self._token_ids, document, is_first=not header.append)
        async with aclosing(self._prefill(header, token_ids, document.num_bytes)) as reports:
            async for report in reports:
                yield report

    def _limit(self, header: IngestHeader) -> TextLimit:
        """What the document may be at most. Raises NotFound or AlreadyExists, before a long text is sent in vain."""
        try:
            held = self._engine.get_context(header.context).tokens
        except NotFound:
            if header.append:
                raise
            held = 0
        else:
            if not header.append:
                raise AlreadyExists(f"contexts/{header.context}")
        return TextLimit(self._engine, self._tokenizer.max_bytes_per_token, held)

    def _token_ids(self, document: "Document", is_first: bool) -> Sequence[int]:
        if document.token_ids:
            return check_ids(document.token_ids, self._tokenizer.vocabulary_size)
        token_ids = self._tokenizer.document_ids(document.text, is_first)
        return check_ids(token_ids, self._tokenizer.vocabulary_size, "text")

    async def _prefill(
        self, header: IngestHeader, token_ids: Sequence[int], num_bytes: int
    ) -> AsyncGenerator[IngestProgress, None]:
        total = len(token_ids)
        yield IngestProgress(phase="prefilling", received_bytes=num_bytes, total=total)
        began, speed = self._clock(), 0.0
        async with aclosing(self._engine.ingest(header.context, token_ids, append=header.append)) as stream:
            async for event in stream:
                if isinstance(event, events.Progress):
                    seconds = self._clock() - began
                    speed = event.processed / seconds if seconds > 0 else 0.0
                    yield IngestProgress(
                        phase="prefilling",
                        received_bytes=num_bytes,
                        processed=event.processed,
                        total=event.total,
                        tokens_per_second=speed,
                    )
        yield IngestProgress(
            phase="ready",
            received_bytes=num_bytes,
            processed=total,
            total=total,
            tokens_per_second=speed,
            context=context_of(self._engine.get_context(header.context)),
        )


class Document:
    """A document that arrives in pieces."""

    def __init__(self, limit: TextLimit) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.num_bytes = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def expect(self, num_bytes: int | None) -> None:
        """Takes the declared size. Raises InvalidArgument when it is no size, or can never fit."""
        if num_bytes is not None and num_bytes < 0:
            raise InvalidArgument("config.total_size_bytes", f"{num_bytes} is negative")
        self._limit.check("config.total_size_bytes", num_bytes or 0)

    def add(self, piece: IngestPiece) -> None:
        """Raises InvalidArgument for text that is not UTF-8 or too long, and for a mixture of payloads."""
        match piece:
            case bytes():
                if self.token_ids:
                    raise InvalidArgument("text", "cannot be mixed with token_ids")
                self._limit.check("text", self.num_bytes + len(piece))
                self._decode(piece)
                self.num_bytes += len(piece)
            case IngestHeader():
                raise InvalidArgument("config", "must be in the first request, and only there")
            case _:
                if self.num_bytes:
                    raise InvalidArgument("token_ids", "cannot be mixed with text")
                self._add_ids(piece)

    def _add_ids(self, token_ids: tuple[int, ...]) -> None:
        total = len(self.token_ids) + len(token_ids)
        if total > self._limit.num_tokens:
            raise InvalidArgument("token_ids", f"{total} tokens or more cannot fit in the {self._limit.name}")
        self.token_ids += token_ids

    def _decode(self, piece: bytes, is_last: bool = False) -> None:
        waiting = len(self._decoder.getstate()[0])  # the start of a character, kept from the piece before
        try:
            self._texts.append(self._decoder.decode(piece, is_last))
        except UnicodeDecodeError as error:
            offset = self.num_bytes - waiting + error.start
            raise InvalidArgument("text", f"is not UTF-8 at byte {offset}: {error.reason}") from None

    def finish(self) -> None:
        """Raises InvalidArgument when the document is empty or ends inside a character."""
        self._decode(b"", is_last=True)
        if not self.num_bytes and not self.token_ids:
            raise InvalidArgument("text", "the document is empty")

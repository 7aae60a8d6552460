"""Events of an upload: the progress of its ingest, and its end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from gateway.bodies import json_fields
from gateway.contexts.resources import described
from gateway.errors import problem_of
from gateway.sse import event
from longleaf.errors import InvalidArgument, LongleafError
from longleaf.types import IngestHeader, IngestProgress

PROGRESS_FIELDS = "phase received_bytes received_tokens processed total tokens_per_second"
NAMES = {"system": "system", "config.total_size_bytes": "Upload-Length", "text": "body"}


class BodyState(Protocol):
    """The state of a body that is forwarded."""

    offset: int

    @property
    def is_over(self) -> bool: ...


class EventBuffer:
    """Events between their source and a client that may not read them. Of consecutive events of progress, only the last
    one is kept."""

    def __init__(self) -> None:
        self._events = list[bytes]()
        self._is_last_progress = self._is_closed = False
        self._changed = asyncio.Event()

    def put(self, content: bytes) -> None:
        self._events.append(content)
        self._is_last_progress = False
        self._changed.set()

    def put_progress(self, content: bytes) -> None:
        if self._is_last_progress and self._events:
            self._events.pop()
        self.put(content)
        self._is_last_progress = True

    def close(self) -> None:
        """Ends `events` after those that are kept."""
        self._is_closed = True
        self._changed.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        while self._events or not self._is_closed:
            self._changed.clear()
            if self._events:
                yield self._events.pop(0)
            else:
                await self._changed.wait()


class UploadEvents:
    """The events of an upload."""

    def __init__(self, model: str, header: IngestHeader, first: IngestProgress, body: BodyState | None = None) -> None:
        """`body` is that of a document that is forwarded as it arrives."""
        self._model, self._header, self._body, self._latest = model, header, body, first

    @property
    def is_sent(self) -> bool:
        """Whether the service has the whole document."""
        return self._latest.phase not in ("receiving", "unspecified", "tokenizing")

    def waiting(self) -> str:
        """Comment text while there are no events."""
        return f"{self._latest.phase}, {self._latest.processed} of {self._latest.total} tokens"

    async def events(self, steps: AsyncGenerator[IngestProgress, None]) -> AsyncGenerator[bytes, None]:
        yield event(self._progress_json(self._latest))
        try:
            async with aclosing(steps):
                async for self._latest in steps:
                    yield event(self._progress_json(self._latest))
        except LongleafError as error:
            yield self._ended(error)

    def _ended(self, error: LongleafError) -> bytes:
        header, body = self._header, self._body
        is_cut = isinstance(error, InvalidArgument) and error.field == "config.total_size_bytes"
        if (
            body is not None
            and is_cut
            and header.upload_id
            and body.is_over
            and body.offset < (header.total_bytes or 0)
        ):
            return event({"phase": "incomplete", "received_bytes": body.offset})
        return event(problem_of(error, NAMES).body, "error")

    def _progress_json(self, progress: IngestProgress) -> dict[str, Any]:
        fields = json_fields(progress, PROGRESS_FIELDS)
        if progress.context is not None:
            fields["context"] = described(progress.context, self._model)
        return fields

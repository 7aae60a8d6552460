"""Uploads of files that are not plain UTF-8 text, and of several files: they are spooled, extracted, and ingested."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, closing, suppress
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.callers import caller_of, client_of, peer_of, with_deadline
from gateway.contexts.extraction import extract_files
from gateway.contexts.received_files import UTF8, ReceivedFile, ReceivedFiles, encoding_of, receive_form
from gateway.contexts.resources import context_problem
from gateway.contexts.upload_events import NAMES, EventBuffer, UploadEvents
from gateway.contexts.upload_slots import UploadSlot, UploadSlots
from gateway.errors import HttpProblem, problem_of, unavailable
from gateway.sse import EventResponse, event, wait_disconnected
from longleaf.client.documents import UploadSource, size_of
from longleaf.client.files import files_of as offsets_of
from longleaf.client.proxy_client import ProxyClient
from longleaf.documents.collection import Collection, Part
from longleaf.documents.errors import NotText, Unreadable
from longleaf.documents.kinds import MEDIA_TYPES, WITH_PACKAGES, check_declared, kind_of
from longleaf.errors import InvalidArgument, LongleafError, StartError
from longleaf.extras import require_extra
from longleaf.types import IngestHeader, IngestProgress

IDLE_SECONDS = 110.0
"""Timeout for the next part of a body."""
BODY_SECONDS = 1200.0
"""Timeout for a whole body."""
FORM = "multipart/form-data"
MAX_REPORTED = 100
"""Files that the events name as left out."""
log = logging.getLogger("gateway")
NOTHING: dict[str, Any] = {
    "received_bytes": 0,
    "received_tokens": 0,
    "processed": 0,
    "total": 0,
    "tokens_per_second": 0.0,
}


@dataclass(frozen=True)
class FileOptions:
    """Parameters of an upload of files."""

    filename: str = ""
    file_headers: bool | None = None
    plain_text: bool = False


def is_file_upload(media_type: str, charset: str, plain_text: bool) -> bool:
    """Whether a body is extracted, and not forwarded as it is."""
    is_unchanged = plain_text and MEDIA_TYPES.get(media_type) in ("html", "notebook")
    return media_type == FORM or charset not in UTF8 or (media_type in MEDIA_TYPES and not is_unchanged)


async def upload_files(
    request: Request, header: IngestHeader, model: str, media_type: str, charset: str, options: FileOptions
) -> Response:
    """Receives the files, checks their kinds, and returns the events of their extraction and ingest."""
    slots: UploadSlots = request.app.state.upload_slots
    client = client_of(request)
    header = replace(header, total_bytes=None, files=())
    encoding = encoding_of(charset)
    await _check_admission(client, header)  # before a slot is occupied, because it may refuse the credential
    with ExitStack() as stack:
        slot = stack.enter_context(slots.slot(caller_of(request), peer_of(request)))
        try:
            files = stack.enter_context(closing(ReceivedFiles()))
            body = _limited(request, slot)
            if media_type == FORM:
                await receive_form(request.headers["content-type"], body, files, slots.parsing)
            else:
                await _receive_file(body, files, media_type, encoding, options)
            if not len(files):
                raise HttpProblem(400, "body: the form has no file", param="body", code="invalid_value")
            for each in files:
                await asyncio.to_thread(_check_kind, files, each, options.plain_text)
        except OSError as error:
            log.error("uploads cannot be stored in %s: %s", tempfile.gettempdir(), error.strerror)
            raise unavailable("the gateway cannot store the files: try again later") from None
        resources = stack.pop_all()
    reporting = FileEvents(client, header, model, options, slot, resources)
    response = EventResponse(reporting.events(files), reporting.waiting, wait_disconnected)

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        with resources:
            await response(scope, receive, send)

    return cast(Response, respond)  # which is callable like a Response


class FileEvents:
    """The events of extraction and ingest."""

    def __init__(
        self,
        client: ProxyClient,
        header: IngestHeader,
        model: str,
        options: FileOptions,
        slot: UploadSlot,
        resources: ExitStack,
    ) -> None:
        """`resources` closes the files and frees `slot`; that happens early once the service has the text."""
        self._client, self._header, self._model, self._options = client, header, model, options
        self._slot, self._resources = slot, resources
        self._ingesting: UploadEvents | None = None

    def waiting(self) -> str:
        """Comment text while there are no events."""
        return "extracting" if self._ingesting is None else self._ingesting.waiting()

    async def events(self, files: ReceivedFiles) -> AsyncGenerator[bytes, None]:
        """All events. A client that does not read them delays neither the extraction nor the ingest."""
        buffer = EventBuffer()
        buffer.put(event({"phase": "extracting", **NOTHING}))
        work = asyncio.create_task(self._run(files, buffer))
        work.add_done_callback(lambda _: buffer.close())
        try:
            async for content in buffer.events():
                yield content
            await work
        finally:
            work.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # otherwise asyncio logs it

    async def _run(self, files: ReceivedFiles, buffer: EventBuffer) -> None:
        found = Collection()
        try:
            steps = extract_files(files, self._slot, as_text=self._options.plain_text, found=found)
            async with aclosing(steps):
                async for section in steps:
                    if section is not None:
                        place = {"file": section.file, "place": section.label}
                        buffer.put_progress(event({"phase": "extracting", **NOTHING, **place}))
        except LongleafError as error:
            buffer.put(event(problem_of(error, NAMES).body, "error"))
            return
        except HttpProblem as problem:
            buffer.put(event(problem.body, "error"))
            return
        document, header = await asyncio.to_thread(self._document, found)
        buffer.put(event({"phase": "extracting", **NOTHING, **_summary(found)}))
        async with aclosing(UploadSource(document)) as source, aclosing(self._ingest(header, source)) as events:
            del found, document
            async for content in events:
                if self._ingesting is not None and self._ingesting.is_sent:
                    self._resources.close()
                buffer.put_progress(content)

    def _document(self, found: Collection) -> tuple[list[Part], IngestHeader]:
        """The parts, which are many, and the header with their offsets."""
        document = found.parts(self._options.file_headers)
        return document, replace(self._header, total_bytes=size_of(document), files=offsets_of(document))

    async def _ingest(self, header: IngestHeader, source: UploadSource) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._client.ingest_once(header, source)) as steps:
            try:
                first = await anext(steps)
            except LongleafError as error:
                yield event(problem_of(error, NAMES).body, "error")
                return
            self._ingesting = UploadEvents(self._model, header, first)
            async with aclosing(self._ingesting.events(steps)) as events:
                async for content in events:
                    yield content


def _summary(found: Collection) -> dict[str, Any]:
    left_out = [{"file": each.file, "reason": each.reason} for each in (*found.left_out, *found.remarks)]
    return {"files": len(found.files), "left_out": left_out[:MAX_REPORTED], "left_out_count": len(found.left_out)}


async def _check_admission(client: ProxyClient, header: IngestHeader) -> None:
    """Raises HttpProblem if the service refuses the upload, such as for a name or a quota, before its files arrive. An
    upload that exists is not changed, and an unknown one is not created."""
    steps = client.ingest_once(header, _NoPieces())
    try:
        async with aclosing(steps):
            first: IngestProgress = await with_deadline(anext(steps))
    except LongleafError as error:
        if isinstance(error, InvalidArgument) and error.field == "config.files":
            return  # the upload exists, with the places of its text, which are not known yet
        raise context_problem(error) from None
    is_new = first.phase == "receiving" and not (first.received_bytes or first.received_tokens)
    if header.upload_id and is_new:
        with suppress(LongleafError):
            await with_deadline(client.cancel_ingest(header.context, header.upload_id))


class _NoPieces:
    """A document that is not sent."""

    error: Exception | None = None

    async def pieces_from(self, offset: int) -> AsyncIterator[bytes]:
        del offset
        await asyncio.Event().wait()
        yield b""

    def acknowledge(self, offset: int) -> None:
        """Does nothing."""


async def _receive_file(
    body: AsyncIterator[bytes], files: ReceivedFiles, media_type: str, encoding: str, options: FileOptions
) -> None:
    """Writes the body, which is one file, to disk."""
    async for part in body:
        await files.write(part)
    if not files.num_bytes:
        raise HttpProblem(400, "body: the document is empty", param="body", code="invalid_value")
    declared = media_type if media_type in MEDIA_TYPES else ""
    files.add(ReceivedFile(options.filename or "document", 0, files.num_bytes, declared, encoding))


async def _limited(request: Request, slot: UploadSlot) -> AsyncGenerator[bytes, None]:
    """The parts of the body. Raises HttpProblem for too many bytes, if nothing arrives, and on eviction."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > slot.limits.file_bytes:
        raise HttpProblem(413, f"the body has more than {slot.limits.file_bytes:,} bytes")
    stream, clock = request.stream(), asyncio.get_running_loop().time
    end = clock() + BODY_SECONDS
    while True:
        try:
            with slot.waiting_until(min(end, clock() + IDLE_SECONDS)) as timeout:
                async with timeout:
                    part = await anext(stream, None)
        except TimeoutError:
            message = f"the body was not received in time: within {BODY_SECONDS:,.0f} s, and each part within "
            message += f"{IDLE_SECONDS:,.0f} s"
            raise HttpProblem(408, message, headers={"connection": "close"}) from None
        if part is None:
            return
        slot.grow(len(part))
        yield part


def _check_kind(files: ReceivedFiles, each: ReceivedFile, plain_text: bool) -> None:
    """Raises HttpProblem if the only file is of a kind that is not read, or if its reader is not installed. Of several
    files, such ones are left out later."""
    try:
        kind = kind_of(each.name, files.head(each), as_text=plain_text)
        if (declared := MEDIA_TYPES.get(each.declared)) is not None:
            check_declared(declared, kind)
            kind = declared if kind == "text" else kind
        if kind in WITH_PACKAGES:
            require_extra("documents", f"reading {each.name}")
    except NotText:
        return  # the extraction decides: the charset may have zero bytes
    except Unreadable as error:
        if len(files) == 1:
            raise HttpProblem(415, f"{each.name} {error}", param="body", code="unsupported_file") from None
    except StartError as error:
        raise HttpProblem(415, str(error), param="body", code="unsupported_file") from None

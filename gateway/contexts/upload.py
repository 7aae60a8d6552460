"""Document uploads: the body is forwarded part by part, and progress is returned as events."""

import asyncio
import math
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, cast

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from gateway.callers import client_of, peer_of, with_deadline
from gateway.contexts.file_upload import FORM, FileOptions, is_file_upload, upload_files
from gateway.contexts.received_files import content_type
from gateway.contexts.resources import check_new, context_from_path, context_problem
from gateway.contexts.upload_events import UploadEvents
from gateway.errors import HttpProblem
from gateway.models import model_name
from gateway.sse import EventResponse, wait_disconnected
from longleaf.document_text import MAX_FILE_NAME
from longleaf.documents.errors import NotText, Unreadable
from longleaf.documents.kinds import MEDIA_TYPES, TITLES, kind_of
from longleaf.documents.text_files import UTF8_BOM, describe_invalid
from longleaf.errors import LongleafError, Unavailable
from longleaf.formatting import printable
from longleaf.types import MAX_TIME, ContextOptions, ContextSettings, IngestHeader, TextFile

IDLE_SECONDS = 110.0
"""Timeout for the next part of a body; shorter than that of the service."""
BUFFERED_BYTES = 1 << 16
PARAMETERS = frozenset(
    "append upload_id display_name pinned ttl capacity system priority filename file_headers plain_text".split()
)


class UploadBody:
    """A request's body, starting at `offset` of its document. Parts are not kept after sending."""

    def __init__(self, receive: Receive, offset: int) -> None:
        self._receive, self.offset = receive, offset
        self.error: Exception | None = None
        self._first: bytes | None = None
        self._has_begun = asyncio.Event()
        """Set when the first part may be read."""
        self._over = asyncio.Event()
        """Set when the body has ended, or the caller has disconnected."""
        self._has_left = False

    @property
    def is_over(self) -> bool:
        """Whether the body is complete, or the caller has disconnected."""
        return self._over.is_set()

    def acknowledge(self, offset: int) -> None:
        """Does nothing, because no parts are kept."""

    async def without_bom(self, header: IngestHeader) -> IngestHeader:
        """Drops a byte order mark at the beginning, and returns the header with the remaining length. Raises
        Unavailable if nothing arrives."""
        self._first = await self._next()
        if not self._first.startswith(UTF8_BOM):
            return header
        self._first = self._first[len(UTF8_BOM) :]
        total = header.total_bytes
        return header if total is None else replace(header, total_bytes=total - len(UTF8_BOM))

    async def begin(self, is_whole: bool) -> None:
        """Waits for the first part, for which `pieces_from` also waits. Raises HttpProblem if it cannot belong to a
        document (`is_whole`: no data follows the body), and Unavailable if nothing arrives."""
        if self._first is None:
            self._first = await self._next()
        if self.offset == 0:
            is_last = is_whole and self.is_over
            if is_last and not self._first:
                raise _no_document("the document is empty")
            try:
                getincrementaldecoder("utf-8")().decode(self._first, final=is_last)
            except UnicodeDecodeError as error:
                raise _no_document(_not_text(self._first, error)) from None
        self._has_begun.set()

    async def pieces_from(self, offset: int) -> AsyncIterator[bytes]:
        """The parts of the body. Raises Unavailable if the body is incomplete."""
        if offset != self.offset:
            return
        await self._has_begun.wait()
        part, self._first = self._first or b"", None
        while True:
            for start in range(0, len(part), BUFFERED_BYTES):
                piece = part[start : start + BUFFERED_BYTES]
                self.offset += len(piece)
                yield piece
            if self.is_over:
                return
            part = await self._next()

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                message = await self._receive()
        except TimeoutError:
            self.error = Unavailable("the body was not received in time")
            raise self.error from None
        if message["type"] == "http.disconnect":
            self._has_left = True
            self._over.set()
            self.error = Unavailable("the client disconnected")
            raise self.error
        if not message.get("more_body", False):
            self._over.set()
        return message.get("body", b"")

    async def wait_left(self, receive: Receive) -> None:
        """Returns when the caller has disconnected; while the body is read, its reader detects that."""
        await self._over.wait()
        if not self._has_left:
            await wait_disconnected(receive)


def _not_text(first: bytes, error: UnicodeDecodeError) -> str:
    """The reason why a body is not UTF-8 text, with the content type to send if its kind is known."""
    try:
        kind = kind_of("", first)
    except Unreadable as reason:
        return describe_invalid("utf-8", error) if isinstance(reason, NotText) else str(reason)
    types = [name for name, each in MEDIA_TYPES.items() if each == kind]
    return f"is {TITLES[kind]}: send it as {types[0]}" if types else describe_invalid("utf-8", error)


def _no_document(message: str) -> HttpProblem:
    return HttpProblem(400, f"body: {message}", param="body", code="invalid_value")


async def upload(request: Request) -> Response:
    """Starts or resumes an upload; see docs/http.md."""
    check_new(request.path_params["id"])
    client, offset = client_of(request), _number(request, "upload-offset") or 0
    header, options = _header(request, offset), _file_options(request)
    model = await model_name(request, client)
    kind, charset = content_type(request.headers.get("content-type", ""))
    if is_file_upload(kind, charset, options.plain_text):
        if offset:
            raise HttpProblem(400, "Upload-Offset: only UTF-8 text may be sent in slices", param="Upload-Offset")
        return await upload_files(request, header, model, kind, charset, options)
    body = UploadBody(request.receive, offset)
    if offset == 0 and not header.upload_id:
        header = await body.without_bom(header)
    steps = client.ingest_once(header, body)
    try:
        first = await anext(steps)
        if first.phase == "receiving" and first.received_bytes != offset:
            message = f"Upload-Offset: the service has {first.received_bytes:,} bytes; continue at that offset"
            headers = {"upload-offset": str(first.received_bytes)}
            raise HttpProblem(409, message, param="Upload-Offset", code="wrong_offset", headers=headers)
        if first.phase == "receiving":  # errors before the first byte of the answer become the status
            declared = _number(request, "content-length")
            await body.begin(header.total_bytes is None or header.total_bytes == offset + (declared or 0))
    except BaseException as error:
        await steps.aclose()
        if isinstance(error, LongleafError):
            raise context_problem(error) from None
        raise
    reporting = UploadEvents(model, header, first, body)
    left = (
        body.wait_left if first.phase == "receiving" else wait_disconnected
    )  # the body of a complete upload is not read again
    # EventResponse is callable like a Response, but not a subclass
    return cast(Response, EventResponse(reporting.events(steps), reporting.waiting, left))


async def upload_state(request: Request) -> Response:
    """The received size of an upload. An unknown upload is not created."""
    client, header = client_of(request), _header(request, 0)
    if not header.upload_id:
        raise HttpProblem(400, "upload_id: is required", param="upload_id")
    steps = client.ingest_once(header, UploadBody(request.receive, -1))
    try:
        async with aclosing(steps):
            first = await with_deadline(anext(steps))
    except LongleafError as error:
        raise context_problem(error) from None
    is_complete = first.phase not in ("receiving", "unspecified")
    if not (is_complete or first.received_bytes or first.received_tokens):  # the query has created it
        with suppress(LongleafError):
            await with_deadline(client.cancel_ingest(header.context, header.upload_id))
    headers = {"upload-offset": str(first.received_bytes), "upload-complete": f"?{int(is_complete)}"}
    return Response(headers=headers)


def _file_options(request: Request) -> FileOptions:
    """Raises HttpProblem."""
    given = dict(request.query_params)
    headers = _flag(given, "file_headers") if "file_headers" in given else None
    name = printable(given.get("filename", ""))
    if len(name.encode()) > MAX_FILE_NAME:
        raise HttpProblem(400, f"filename: has more than {MAX_FILE_NAME:,} bytes", param="filename")
    return FileOptions(name, headers, _flag(given, "plain_text"))


def _header(request: Request, offset: int) -> IngestHeader:
    """The ingest header from the request's parameters; the body starts at `offset` of the document. Raises
    HttpProblem."""
    kind, _ = content_type(request.headers.get("content-type", ""))
    is_other = kind.endswith("json") or (kind.startswith("multipart/") and kind != FORM)
    if request.method == "POST" and is_other and kind not in MEDIA_TYPES:
        raise HttpProblem(415, "the body must be the document itself, such as text/plain")
    given = dict(request.query_params)
    if unknown := given.keys() - PARAMETERS:
        raise HttpProblem(400, f"unknown parameter: {min(unknown)}", param=min(unknown))
    total, declared = _number(request, "upload-length"), _number(request, "content-length")
    if request.method == "POST" and total is None and declared is not None:
        total = offset + declared
    if total is not None and total < offset + (declared or 0):
        raise HttpProblem(
            400, "Upload-Length: is less than the offset and the length of the body", param="Upload-Length"
        )
    options = dict[str, Any]()
    if (name := given.get("display_name")) is not None:
        options["display_name"] = name
    if "pinned" in given:
        options["is_pinned"] = _flag(given, "pinned")
    if "ttl" in given:
        options["ttl"] = _positive(given, "ttl")
    if "capacity" in given:
        options["capacity"] = _whole(given, "capacity")
    return IngestHeader(
        context=context_from_path(request),
        append=_flag(given, "append"),
        total_bytes=total,
        upload_id=given.get("upload_id", ""),
        settings=ContextSettings(**cast(ContextOptions, options)),
        system=given.get("system", ""),
        priority=_whole(given, "priority") if "priority" in given else 0,
        client=peer_of(request),
        files=(TextFile(name, 0),) if (name := printable(given.get("filename", ""))) else (),
    )


def _number(request: Request, header: str) -> int | None:
    value = request.headers.get(header)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise HttpProblem(400, f"{header}: is not a number of bytes", param=header)
    return int(value)


def _flag(given: dict[str, str], name: str) -> bool:
    value = given.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise HttpProblem(400, f"{name}: must be true or false", param=name)
    return value in ("true", "1")


def _whole(given: dict[str, str], name: str) -> int:
    try:
        found = int(given[name])
    except ValueError:
        found = 1 << 63
    if abs(found) >= 1 << 31:
        raise HttpProblem(400, f"{name}: must be an integer", param=name)
    return found


def _positive(given: dict[str, str], name: str) -> float:
    try:
        found = float(given[name])
    except ValueError:
        found = math.nan
    if not 0 < found <= MAX_TIME:
        raise HttpProblem(400, f"{name}: must be positive and end before the year 10000", param=name)
    return found

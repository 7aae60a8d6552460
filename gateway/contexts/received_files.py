"""Bodies of uploads on disk: one temporary file for each upload, for any number of its files.

A form needs neither a descriptor nor memory for each of its files, so that a few uploads exhaust neither.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import HttpProblem
from longleaf.documents.kinds import HEAD_BYTES
from longleaf.documents.text_files import check_encoding
from longleaf.errors import InvalidArgument
from longleaf.formatting import printable

MAX_FILES = 256
"""Files of a form."""
MAX_FIELDS = 16
"""Fields of a form that are not files."""
UTF8 = frozenset(("", "utf-8", "utf8", "us-ascii", "ascii"))
"""Charsets that need no conversion."""
COPIED_BYTES = 1 << 20
"""Bytes of a file in memory while it is copied."""
MAX_NAME = 512
"""Characters of a file name; the rest is cut off."""


@dataclass(frozen=True)
class ReceivedFile:
    """A file of an upload: a range of the bytes on disk."""

    name: str
    start: int
    num_bytes: int
    declared: str = ""
    """Media type, in lower case and without parameters."""
    encoding: str = ""
    """Python's name; empty for UTF-8 or if not declared."""


class ReceivedFiles:
    """The files of an upload, in a temporary file. To be closed."""

    def __init__(self) -> None:
        self._file = _temporary_file()
        self._files = list[ReceivedFile]()
        self._num_bytes = 0

    def __iter__(self) -> Generator[ReceivedFile]:
        yield from self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Size of all files, up to now."""
        return self._num_bytes

    async def write(self, data: bytes) -> None:
        """Appends bytes of the next file. Raises OSError."""
        if data:
            self._num_bytes += len(data)
            await asyncio.to_thread(_write_all, self._file, data)

    def add(self, file: ReceivedFile) -> None:
        """Adds a file whose bytes are on disk."""
        self._files.append(file)

    def head(self, file: ReceivedFile) -> bytes:
        """The first bytes, from which the kind is recognized. Raises OSError."""
        return os.pread(self._file.fileno(), min(HEAD_BYTES, file.num_bytes), file.start)

    @contextmanager
    def opened(self, file: ReceivedFile) -> Generator[BinaryIO]:
        """A file object at its beginning that has only the bytes of the file; one of several files is copied. Raises
        OSError."""
        if file.num_bytes == self._num_bytes:
            self._file.seek(0)
            yield self._file
            return
        with _temporary_file() as copy:
            position, end = file.start, file.start + file.num_bytes
            while position < end:
                data = os.pread(self._file.fileno(), min(COPIED_BYTES, end - position), position)
                _write_all(copy, data)
                position += len(data)
            copy.seek(0)
            yield copy

    def close(self) -> None:
        """Frees the disk. Idempotent."""
        self._file.close()


def _temporary_file() -> BinaryIO:
    """Without a buffer, because the extraction reads by the descriptor, and because closing a file with buffered bytes
    on a full disk raises a second error."""
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=0))


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


async def receive_form(header: str, body: AsyncIterable[bytes], files: ReceivedFiles, parsing: asyncio.Lock) -> None:
    """Writes the files of a form, whose Content-Type is `header`, to disk; its other fields are ignored. Raises
    HttpProblem for a form that is invalid or has too many parts, and OSError.

    A part of the body is parsed while `parsing` is held, and in a thread: bytes that resemble a boundary are slow to
    parse, and the threads of many forms would delay the event loop."""
    parser = _FormParser(header)
    async for part in body:
        async with parsing:
            data = await asyncio.to_thread(parser.parsed, part)
        await files.write(data)
    for file in parser.files():
        files.add(file)


class _FormParser:
    """Separates the bytes of files from a form (RFC 7578)."""

    def __init__(self, header: str) -> None:
        boundary = parse_options_header(header)[1].get(b"boundary", b"")
        if not boundary:
            raise _invalid_form("Content-Type has no boundary")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_header_name,
                    "on_header_value": self._add_to_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _invalid_form(str(error)) from None
        self._data = bytearray()
        """Bytes of files in the present part of the body."""
        self._files = list[ReceivedFile]()
        self._num_bytes = self._num_fields = self._start = 0
        self._is_complete = False
        self._name: str | None = None
        """That of the present file; None within a field that is not a file."""
        self._headers = dict[bytes, bytes]()
        self._header_name, self._header_value = bytearray(), bytearray()

    def parsed(self, part: bytes) -> bytes:
        """The bytes of files in the next part of the body."""
        self._data = bytearray()
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise _invalid_form(str(error)) from None
        return bytes(self._data)

    def files(self) -> list[ReceivedFile]:
        """All files, when the body has ended."""
        if not self._is_complete:
            raise _invalid_form("it ends without its last boundary")
        return self._files

    def _begin_part(self) -> None:
        self._headers = {}
        self._header_name, self._header_value = bytearray(), bytearray()
        self._name = None

    def _add_to_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise _invalid_form("Content-Disposition of a part has no name")
        if b"filename" not in options:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise _invalid_form(f"it has more than {MAX_FIELDS} fields that are not files")
            return
        if len(self._files) >= MAX_FILES:
            raise _invalid_form(f"it has more than {MAX_FILES} files")
        self._name = printable(options[b"filename"].decode(errors="replace") or "file")[:MAX_NAME]
        self._start = self._num_bytes

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None:
            self._data += data[start:end]
            self._num_bytes += end - start

    def _end_part(self) -> None:
        if self._name is not None:
            declared, charset = content_type(self._headers.get(b"content-type", b"").decode("latin-1"))
            self._files.append(
                ReceivedFile(self._name, self._start, self._num_bytes - self._start, declared, encoding_of(charset))
            )

    def _end(self) -> None:
        self._is_complete = True


def _invalid_form(reason: str) -> HttpProblem:
    return HttpProblem(400, f"body: is not a valid form: {reason}", param="body", code="invalid_value")


def content_type(value: str) -> tuple[str, str]:
    """Media type and charset of a Content-Type header, in lower case; empty if not stated."""
    kind, options = parse_options_header(value)
    return kind.decode("latin-1"), options.get(b"charset", b"").decode("latin-1").lower()


def encoding_of(charset: str) -> str:
    """Python's name of a declared charset; empty for UTF-8 and for none. Raises HttpProblem if it is unknown."""
    if charset in UTF8:
        return ""
    try:
        return check_encoding(charset, "charset")
    except InvalidArgument as error:
        raise HttpProblem(415, f"charset: {error.description}", param="content-type") from None

"""Documents on their way to the service: text, bytes, files or streams become pieces of a size that travels well."""

import asyncio
import errno
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from longleaf.codec import encodable
from longleaf.errors import InvalidArgument
from longleaf.messages import IngestPiece

PIECE_BYTES = 1 << 18
PIECE_TOKENS = 1 << 16


@runtime_checkable
class Readable(Protocol):
    """An open binary file."""

    def read(self, size: int, /) -> bytes: ...


Document = str | bytes | Path | Readable | tuple[int, ...] | Iterator[bytes] | AsyncIterable[bytes]
"""Text, UTF-8 bytes, a file's path, an open binary file, token ids, or UTF-8 bytes cut anywhere."""


async def pieces_of(document: Document) -> AsyncIterator[IngestPiece]:
    """Raises InvalidArgument when a file cannot be read."""
    match document:
        case str():
            source = _cut(encodable(document, "text").encode())
        case bytes():
            source = _cut(document)
        case tuple():
            starts = range(0, len(document), PIECE_TOKENS)
            source = (document[start : start + PIECE_TOKENS] for start in starts)
        case Path():
            source = _read_path(document)
        case Readable():
            source = _read(document.read)
        case _:
            source = document
    if isinstance(source, AsyncIterable):
        async for piece in source:
            yield piece
    else:
        for piece in source:
            yield piece


def _cut(data: bytes) -> Iterable[bytes]:
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


async def _read_path(path: Path) -> AsyncIterator[bytes]:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as error:
        raise InvalidArgument("file", f"{path} cannot be read: {error.strerror}") from error
    with file:
        async for piece in _read(file.read):
            yield piece


async def _read(read: Callable[[int], bytes]) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(read, PIECE_BYTES):
            yield piece
    except OSError as error:
        raise InvalidArgument("file", f"cannot be read: {error.strerror}") from error


def size_of(document: Document) -> int | None:
    """UTF-8 bytes of the document, None when not known beforehand. Raises InvalidArgument for an unreadable file."""
    match document:
        case str():
            return len(encodable(document, "text").encode())
        case bytes():
            return len(document)
        case Path():
            return _size_on_disk(document)
        case _:
            return None


def _size_on_disk(path: Path) -> int | None:
    """None for what is no regular file: pipes and devices may be read as well."""
    try:
        status = path.stat()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise InvalidArgument("file", f"{path} cannot be read: {error.strerror}") from error
    return status.st_size if path.is_file() else None

"""Document sources: text, bytes, files and streams are read as pieces of bounded size."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, SupportsIndex, TypeVar, cast, runtime_checkable

from longleaf.codec import BytesLike, as_bytes, check_utf8, is_sequence
from longleaf.daemon_threads import call_in_thread
from longleaf.document_text import NamedPart
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.types import IngestHeader, IngestPiece

PIECE_BYTES = 1 << 18
PIECE_TOKENS = 1 << 16
END = object()
"""Marks the end of an iterator."""
T = TypeVar("T")
Cuttable = TypeVar("Cuttable", bytes, memoryview, Sequence[int], "IdArray")


@runtime_checkable
class Readable(Protocol):
    """An open file. Text is encoded as UTF-8."""

    def read(self, size: int, /) -> bytes | str: ...


@runtime_checkable
class IdArray(Protocol):
    """Token ids in a one-dimensional array, such as numpy's."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice, /) -> "IdArray": ...
    def tolist(self) -> list[int]: ...


Part = str | BytesLike | NamedPart | Path | Readable | Sequence[int] | IdArray
"""Text, UTF-8 bytes (split anywhere), text with the name of its file, a file path, an open file, or token ids."""
Document = Part | Iterable[Part] | AsyncIterable[Part]
"""One part, or several that are concatenated without separator: all of text, or all of token ids."""


async def pieces_of(document: Document) -> AsyncGenerator[IngestPiece, None]:
    """Raises InvalidArgument if a file cannot be read, or for an unsupported part."""
    are_parts = not is_part(document) and (is_sequence(document) or isinstance(document, AsyncIterable))
    parts = cast(Iterable[Part] | AsyncIterable[Part], document) if are_parts else (document,)
    if isinstance(parts, AsyncIterable):
        async for part in parts:
            async for piece in _pieces_of_part(part):
                yield piece
    else:
        for part in parts:
            async for piece in _pieces_of_part(part):
                yield piece


def is_part(document: object) -> bool:
    """Whether it is a single part and not a sequence of parts."""
    if isinstance(document, str | BytesLike | NamedPart | Path | Readable | IdArray):
        return True
    parts = cast(Sequence[object], document) if isinstance(document, Sequence) else ()
    return bool(parts) and isinstance(parts[0], SupportsIndex) and not isinstance(parts[0], IdArray)


def _is_reusable(document: object) -> bool:
    """Whether it can be read again: open files, pipes and iterators cannot."""
    if isinstance(document, Readable):
        return False
    if isinstance(document, Path | NamedPart):
        content = _content(document)
        return content.is_file() if isinstance(content, Path) else True
    if is_part(document):
        return True
    return isinstance(document, Sequence) and all(_is_reusable(part) for part in cast(Sequence[object], document))


async def _pieces_of_part(part: object) -> AsyncGenerator[IngestPiece, None]:
    part = _content(part)
    match part:
        case str():
            source = _cut(check_utf8(part, "text").encode(), PIECE_BYTES)
        case bytes() | bytearray() | memoryview():
            source = map(bytes, _cut(as_bytes(cast(BytesLike, part), "text"), PIECE_BYTES))
        case Path():
            source = _read_path(part)
        case Readable():
            source = _read(part.read)
        case IdArray():
            source = (ids.tolist() for ids in _cut(part, PIECE_TOKENS))
        case Sequence():
            source = _cut(cast(Sequence[int], part), PIECE_TOKENS)
        case _:
            message = f"{type(part).__name__} is neither text, bytes, a path, an open file nor a sequence of token ids"
            raise InvalidArgument("document", message)
    if isinstance(source, AsyncIterable):
        async for piece in source:
            yield piece
    else:
        for piece in source:
            yield piece


def _content(part: object) -> object:
    return part.content if isinstance(part, NamedPart) else part


class UploadSource:
    """The pieces of a document. Unacknowledged pieces are kept for resending; acknowledged ones can be sent again if
    the document can be read again.

    Offsets are in bytes, or in token ids. An error of the document itself is kept in `error`, because a call whose
    request stream fails reports only CANCELLED.
    """

    def __init__(self, document: Document) -> None:
        self.error: Exception | None = None
        self._document = document if _is_reusable(document) else None
        self._pieces = pieces_of(document)
        self._next: asyncio.Task[IngestPiece | None] | None = None
        self._retained: deque[bytes | Sequence[int]] = deque()
        self._start = 0
        """Offset of the first piece kept."""
        self._num_readers = 0

    def acknowledge(self, offset: int) -> None:
        """Records that the service has all data before `offset`."""
        while self._retained and self._start + len(self._retained[0]) <= offset:
            self._start += len(self._retained.popleft())

    async def pieces_from(self, offset: int) -> AsyncIterator[IngestPiece]:
        """The pieces from `offset` on. Ends when another reader starts. Raises Unavailable if data that was already
        acknowledged is requested and cannot be read again."""
        self._num_readers += 1
        reader = self._num_readers
        if offset < self._start:
            await self._restart()
        start = self._start
        for piece in tuple(self._retained):
            if start + len(piece) > offset:
                yield piece[max(0, offset - start) :]
            start += len(piece)
        while (piece := await self._read(reader)) is not None:
            start += len(piece)
            if start > offset:
                yield piece[max(0, offset - start + len(piece)) :]
            else:
                self.acknowledge(offset)

    async def _restart(self) -> None:
        """Restarts reading from the beginning. Raises Unavailable."""
        if self._document is None:
            message = "the service has lost acknowledged parts of the document, and the document cannot be read again"
            self.error = Unavailable(message)
            raise self.error
        await self._close()
        self._retained.clear()
        self._pieces, self._next, self._start = pieces_of(self._document), None, 0

    async def _read(self, reader: int) -> "bytes | Sequence[int] | None":
        """The next piece, which is kept. If the reader is cancelled while it waits, the next reader gets the piece."""
        if reader != self._num_readers:
            return None
        try:
            self._next = self._next or asyncio.create_task(self._take())
            piece = await asyncio.shield(self._next)
        except Exception as error:
            self.error = error
            raise
        if reader != self._num_readers or piece is None:
            return None
        assert not isinstance(piece, IngestHeader)
        self._next = None
        self._retained.append(piece)
        return piece

    async def _take(self) -> IngestPiece | None:
        return await anext(self._pieces, None)

    async def aclose(self) -> None:
        """Closes the document and ends its reader."""
        self._num_readers += 1
        await self._close()

    async def _close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._pieces.aclose()


def _cut(data: Cuttable, size: int) -> Iterable[Cuttable]:
    return (data[start : start + size] for start in range(0, len(data), size))


async def _read_path(path: Path) -> AsyncIterator[bytes]:
    try:
        file = await in_thread(path.open, "rb")
    except OSError as error:
        raise InvalidArgument("file", f"{path} cannot be read: {error.strerror}") from error
    with file:
        async for piece in _read(file.read):
            yield piece


async def _read(read: Callable[[int], bytes | str]) -> AsyncIterator[bytes]:
    try:
        while piece := await in_thread(read, PIECE_BYTES):
            yield check_utf8(piece, "text").encode() if isinstance(piece, str) else piece
    except OSError as error:
        raise InvalidArgument("file", f"cannot be read: {error.strerror}") from error


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Like `asyncio.to_thread`, but in a daemon thread, because reading a pipe may block interpreter exit forever."""
    return await asyncio.wrap_future(call_in_thread(partial(function, *arguments)))


def off_the_loop(document: Document) -> Document:
    """The document, with an iterator advanced in threads: it may block, or call the client that reads it."""
    is_iterator = is_sequence(document) and not isinstance(document, Sequence | Readable | Path | IdArray)
    return _advanced_in_threads(cast(Iterable[Part], document)) if is_iterator else document


async def _advanced_in_threads(parts: Iterable[Part]) -> AsyncIterator[Part]:
    iterator = iter(parts)
    while (part := await in_thread(next, iterator, END)) is not END:
        yield cast(Part, part)


def size_of(document: Document) -> int | None:
    """Size of the document in UTF-8 bytes, None if unknown in advance. Raises InvalidArgument for an unreadable
    file."""
    match document:
        case str():
            return len(check_utf8(document, "text").encode())
        case NamedPart():
            return size_of(document.content)
        case bytes() | bytearray() | memoryview():
            return len(as_bytes(cast(BytesLike, document), "text"))
        case Path():
            return _size_on_disk(document)
        case list() | tuple() if not is_part(document):
            sizes = [size_of(part) for part in cast(Sequence[Part], document)]
            return None if None in sizes else sum(size for size in sizes if size is not None)
        case _:
            return None


def _size_on_disk(path: Path) -> int | None:
    """None for anything but a regular file with a non-zero size: pipes, devices and files of procfs have no known
    size."""
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidArgument("file", f"{path} cannot be read: {error.strerror}") from error
    if path.is_dir():
        raise InvalidArgument("file", f"{path} is a folder: give its files, such as {path / '*.txt'}")
    return status.st_size or None if path.is_file() else None

"""Client side of context archives: target files, export streams and import streams."""

import os
import re
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from msgspec.structs import replace

from longleaf import codec
from longleaf.client.calls import Calls
from longleaf.client.documents import Readable, UploadSource, in_thread, size_of
from longleaf.client.generation_stream import can_resume
from longleaf.client.retries import was_refused
from longleaf.client.upload import UploadStream, upload
from longleaf.errors import InvalidArgument, LongleafError, ResourceExhausted, Unavailable
from longleaf.types import (
    ArchiveChunk,
    ExportContext,
    ExportedArchive,
    ExportProgress,
    ImportHeader,
    ImportProgress,
    IngestPiece,
)

T = TypeVar("T")
PART, DIGEST = ".part", ".part.digest"
"""Suffixes of the incomplete file, and of the file with the digest of the archive."""


_DIGEST = re.compile("[0-9a-f]{64}")


class ArchiveTarget:
    """Destination of an archive. `num_bytes` counts the bytes written so far; `digest` is that of the whole archive."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.digest = ""

    async def begin(self, archive: ExportedArchive) -> None:
        """Starts or continues this archive. Raises InvalidArgument."""
        self.digest = archive.digest

    async def write(self, data: bytes) -> None:
        """Raises InvalidArgument if the write fails."""
        await _with_file_errors(self._file.write, data)
        self.num_bytes += len(data)

    async def finish(self) -> None:
        """Flushes the target after the last byte."""
        await _with_file_errors(self._file.flush)

    async def close(self) -> None:
        """Releases the target."""


class FileTarget(ArchiveTarget):
    """A file at `path`, which is written under a temporary name until it is complete."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file)
        self._path, self._part = path, file

    @classmethod
    async def open(cls, path: Path, *, resume: bool) -> "FileTarget":
        """Raises InvalidArgument if the file exists, is not writable, or cannot be resumed."""
        return await _with_file_errors(cls._open, path, resume)

    @classmethod
    def _open(cls, path: Path, resume: bool) -> "FileTarget":
        if path.exists():
            raise InvalidArgument("file", f"{path} exists; move it, or give another name")
        part, recorded = _beside(path, PART), _beside(path, DIGEST)
        if resume and not (part.exists() and recorded.exists()):
            raise InvalidArgument("resume", f"there is no {part} to continue")
        digest = recorded.read_text().strip() if resume else ""
        if resume and not _DIGEST.fullmatch(digest):
            raise InvalidArgument("resume", f"{recorded} has no digest of {part}: export again without resume")
        target = cls(path, part.open("ab" if resume else "wb"))
        if resume:
            target.num_bytes, target.digest = part.stat().st_size, digest
        else:
            recorded.unlink(missing_ok=True)
        return target

    async def begin(self, archive: ExportedArchive) -> None:
        if not self.digest:
            await _with_file_errors(_beside(self._path, DIGEST).write_text, archive.digest)
        await super().begin(archive)

    async def finish(self) -> None:
        await _with_file_errors(self._finish)

    def _finish(self) -> None:
        self._part.flush()
        os.fsync(self._part.fileno())
        self._part.close()
        os.replace(_beside(self._path, PART), self._path)
        _beside(self._path, DIGEST).unlink(missing_ok=True)

    async def close(self) -> None:
        await _with_file_errors(self._close)

    def _close(self) -> None:
        self._part.close()
        if not self.digest:  # nothing was received
            _beside(self._path, PART).unlink(missing_ok=True)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


async def _with_file_errors(function: Callable[..., T], *arguments: object) -> T:
    """Calls a function that may block. Raises InvalidArgument for file errors, except BrokenPipeError."""
    try:
        return await in_thread(function, *arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InvalidArgument("file", f"cannot be written: {error.strerror or error}") from error


async def export(
    calls: Calls,
    method: Any,
    wanted: ExportContext,
    target: ArchiveTarget,
    timeout: float | None,
) -> AsyncGenerator[ExportProgress, None]:
    """Writes an archive to its target, starting at the target's current offset. Opens a new stream when one breaks."""
    attempts, archive = calls.attempts("ExportContext", timeout), None
    while True:
        request = codec.encode_export(replace(wanted, offset=target.num_bytes, digest=target.digest))
        begun = target.num_bytes
        try:
            stream = calls.stream(method, request, attempts, codec.decode_exported)
            async with aclosing(stream):
                async for updates in stream:
                    if isinstance(updates, ExportedArchive):
                        archive = _checked(updates, archive, calls.server)
                        await target.begin(updates)
                    elif archive is not None and updates:
                        if target.num_bytes + len(updates) > archive.num_bytes:
                            raise LongleafError(f"{calls.server} sent more bytes than it announced")
                        await target.write(updates)
                        attempts.reset_limits()
                        yield ExportProgress(target.num_bytes, archive)
            if archive is None or target.num_bytes != archive.num_bytes:
                raise Unavailable(f"{calls.server} ended the export before the archive was complete")
            await target.finish()
            return
        except LongleafError as error:
            if _was_slow(error) and target.num_bytes > begun:
                continue
            if not (archive is not None and can_resume(error)):
                raise
            await attempts.wait(error, is_repeatable=True)


def _checked(updates: ExportedArchive, before: ExportedArchive | None, server: str) -> ExportedArchive:
    if before not in (None, updates):
        raise LongleafError(f"{server} sent a different archive when the export was resumed")
    return updates


def _was_slow(error: LongleafError) -> bool:
    """Whether the service closed the stream because it was read too slowly, for example if the target is a pipe."""
    return isinstance(error, ResourceExhausted) and error.subject == "stream"


async def import_archive(
    calls: Calls, method: Any, header: ImportHeader, source: UploadSource, timeout: float | None
) -> AsyncGenerator[ImportProgress, None]:
    """Sends an archive. Opens a new stream when one breaks."""
    attempts, furthest = calls.attempts("ImportContext", timeout), -1
    while True:
        sending = UploadStream(codec.encode_import_piece(header), source, _piece, _place_of)
        steps = upload(calls, method, sending, codec.decode_import_progress, attempts.time_left())
        try:
            async with aclosing(steps):
                async for progress in steps:
                    if progress.received_bytes > furthest:
                        furthest = progress.received_bytes
                        attempts.reset_limits()
                    yield progress
            return
        except LongleafError as error:
            if source.error or not (furthest < 0 or can_resume(error) or was_refused(error)):
                raise
            await attempts.wait(error, is_repeatable=True)


def header_of(file: Path | Readable, name: str | None, upload_id: str) -> ImportHeader:
    """The first message of an import. Without an `upload_id` it gets a random one, so that every import can be resumed.
    Raises InvalidArgument for an unreadable file."""
    return ImportHeader(context=name, upload_id=upload_id or uuid.uuid4().hex, total_bytes=size_of(file))


def _piece(piece: IngestPiece, offset: int) -> object:
    assert isinstance(piece, bytes)
    return codec.encode_import_piece(ArchiveChunk(offset, piece))


def _place_of(progress: ImportProgress) -> tuple[int, bool]:
    return progress.received_bytes, progress.context is None

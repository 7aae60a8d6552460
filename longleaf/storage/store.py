"""Object storage with digests, timeouts and actionable errors."""

import errno
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
from blake3 import blake3

from longleaf.errors import AlreadyExists, DataLoss, InvalidArgument, LongleafError, NotFound, StorageUnavailable
from longleaf.storage.files import Files, ObjectInfo, check_name, is_name
from longleaf.storage.timed_calls import StorageTimeout, TimedCall, TimedCalls
from longleaf.storage.urls import FIELD, connect, redact_url

Buffer = bytes | bytearray | memoryview
Found = TypeVar("Found")
TIMEOUT = 60.0
"""Timeout in seconds of a call, which transfers one object of about ten megabytes, or a listing."""
PROBE = "probe"
"""Object for testing whether writes succeed."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRONG = (PermissionError, FileNotFoundError, NotADirectoryError, NotImplementedError, ValueError, TypeError)
"""Exceptions that waiting does not resolve: the storage does not exist or is not writable, or a parameter of its driver
is invalid."""


class WriteResult(msgspec.Struct, frozen=True):
    """Result of a write."""

    num_bytes: int
    digest: str
    """BLAKE3 in hexadecimal."""


class Store:
    """The objects of `files`, named `url` in errors.

    All calls block for at most `timeout` seconds, per object if there are several, and are thread-safe. They raise
    StorageUnavailable if the storage is unreachable, full, read-only or too slow; the operation may then still be
    running and reading the passed buffers. Content is verified only against a passed digest: a caller must pass the
    digest of data that does not contain its own checksum.
    """

    def __init__(self, files: Files, url: str, timeout: float = TIMEOUT) -> None:
        self.url = redact_url(url)
        self._files = files
        self._calls = TimedCalls(timeout)

    @classmethod
    def open(cls, url: str, timeout: float = TIMEOUT, *, probe: bool = True) -> "Store":
        """The storage at `url`: a folder, as a path or file://, or any URL that fsspec supports.

        Unless `probe` is false, a small object is written as a test; a full storage is accepted, because it can
        still be read. Raises InvalidArgument naming `snapshot_url` if the URL is invalid, its driver is not installed,
        or writing is forbidden, and StorageUnavailable if it is unreachable.
        """
        with _refusing():
            with _translated_errors(redact_url(url), "opened"):
                calls = TimedCalls(timeout)
                store = cls(calls.end(calls.begin(partial(connect, url))), url, timeout)
            if probe:
                store._try()
        return store

    def put(self, name: str, parts: Sequence[Buffer], *, is_new: bool = False) -> WriteResult:
        """Writes the concatenated parts as `name`. In a folder, the object is durable on return.

        Raises AlreadyExists, without changes, if `is_new` and the name is taken.
        """
        check_name(name)
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        try:
            with _translated_errors(self.url, "written", *([FileExistsError] if is_new else [])):
                call = self._calls.begin(partial(self._files.write, name, views, is_new))
                digest = blake3()
                for view in views:  # hashed during the write
                    digest.update(view)
                self._calls.end(call)
        except FileExistsError:
            raise AlreadyExists(name) from None
        return WriteResult(sum(len(view) for view in views), digest.hexdigest())

    def get(self, name: str, digest: str | None = None) -> bytes:
        """The object. Raises NotFound, and DataLoss if its digest differs from `digest`."""
        check_name(name)
        try:
            content = self._call("read", partial(self._files.read, name), FileNotFoundError)
        except FileNotFoundError:
            raise NotFound(name) from None
        if digest is not None and blake3(content).hexdigest() != digest:
            raise DataLoss(name, f"its {len(content):,} bytes differ from those written to {self.url}")
        return content

    def size(self, name: str) -> int:
        """Size of the object. Raises NotFound."""
        found = self._find(name)
        if found is None:
            raise NotFound(name)
        return found.num_bytes

    def exists(self, name: str) -> bool:
        return self._find(name) is not None

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """All objects below `folder`, in any order; none if the folder does not exist. Names that end with PART are
        incomplete objects. Files with invalid names are skipped."""
        if folder:
            check_name(folder)
        return iter(self._call("listed", lambda: [one for one in self._files.list(folder) if is_name(one.name)]))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes the objects one by one; missing ones are ignored."""
        for name in names:
            check_name(name)
            self._call("deleted from", partial(self._files.remove, name))

    def _find(self, name: str) -> ObjectInfo | None:
        check_name(name)
        return self._call("read", partial(self._files.find, name))

    def _call(self, verb: str, work: Callable[[], Found], *passed: type[Exception]) -> Found:
        with _translated_errors(self.url, verb, *passed):
            call: TimedCall[Found] = self._calls.begin(work)
            return self._calls.end(call)

    def _try(self) -> None:
        """Writes and deletes a test object; a full storage passes."""
        try:
            self.put(PROBE, [b"longleaf"])
            self.delete([PROBE])
        except StorageUnavailable as error:
            if not _is_full(error.__cause__):
                raise


@contextmanager
def _translated_errors(url: str, verb: str, *passed: type[Exception]) -> Generator[None, None, None]:
    """Converts any driver exception to StorageUnavailable, except `passed`."""
    try:
        yield
    except (LongleafError, MemoryError, *passed):
        raise
    except Exception as error:
        raise StorageUnavailable(f"{url} cannot be {verb}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The cause of the error, and the remedy."""
    if _is_full(error):
        return "it is full; free space there"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "it is read-only; mount it for writing"
    if isinstance(error, PermissionError):
        return "access is denied; check the credentials and their permissions"
    reason = (error.strerror if isinstance(error, OSError) else "") or f"{error}" or type(error).__name__
    reason = re.sub(r"://[^/\s@]*@", "://", reason)  # drivers include passwords in URLs
    if isinstance(error, StorageTimeout):
        return f"{reason}; check that it can be reached from this machine"
    return f"{reason}; check that it exists and can be reached from this machine"


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def _refusing() -> Generator[None, None, None]:
    """Converts permanent errors to InvalidArgument."""
    try:
        yield
    except StorageUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, _WRONG) or (isinstance(cause, OSError) and cause.errno == errno.EROFS):
            raise InvalidArgument(FIELD, f"{error}") from cause
        raise

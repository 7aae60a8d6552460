"""A storage: objects under names, with digests, in limited time, and with errors that say what to do."""

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
from longleaf.storage.urls import FIELD, connect, shown

Buffer = bytes | bytearray | memoryview
Found = TypeVar("Found")
TIMEOUT = 60.0
"""Seconds that a call may take: one object of some ten megabytes, or a listing."""
PROBE = "probe"
"""What is written to see whether anything can be."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRONG = (PermissionError, FileNotFoundError, NotADirectoryError, NotImplementedError, ValueError, TypeError)
"""What is raised by a storage that is not there, or may not be written, and by a driver that was told nonsense."""


class WriteResult(msgspec.Struct, frozen=True):
    """What was put."""

    num_bytes: int
    digest: str
    """Hexadecimal digits of BLAKE3."""


class Store:
    """The objects of `files`, called `url` where people read of it.

    All calls block, from any thread, for at most `timeout` seconds each, or each object where there are several. They
    raise StorageUnavailable where the storage is away, full, read-only or too slow; then what was begun may still go
    on, and buffers that were put may still be read. Objects are as whole as the storage makes them: who reads one
    without a checksum of its own gives its digest.
    """

    def __init__(self, files: Files, url: str, timeout: float = TIMEOUT) -> None:
        self.url = shown(url)
        self._files = files
        self._calls = TimedCalls(timeout)

    @classmethod
    def open(cls, url: str, timeout: float = TIMEOUT, *, is_tried: bool = True) -> "Store":
        """The storage at `url`: a folder, as a path or file://, or any URL that fsspec has a driver for.

        It is tried with a small object unless that is not wanted, but may be full: what it has can still be read.
        Raises InvalidArgument naming `snapshot_url` where the URL is wrong, its driver is not installed, or nothing may
        be written there, and StorageUnavailable where it cannot be reached now.
        """
        with _refusing():
            with _telling(shown(url), "opened"):
                calls = TimedCalls(timeout)
                store = cls(calls.end(calls.begin(partial(connect, url))), url, timeout)
            if is_tried:
                store._try()
        return store

    def put(self, name: str, parts: Sequence[Buffer], *, is_new: bool = False) -> WriteResult:
        """Writes the bytes of all parts, one after the other, under `name`. In a folder they are then on the disk.

        Raises AlreadyExists, and changes nothing, where `is_new` and the name is taken.
        """
        check_name(name)
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        try:
            with _telling(self.url, "written", *([FileExistsError] if is_new else [])):
                call = self._calls.begin(partial(self._files.write, name, views, is_new))
                digest = blake3()
                for view in views:  # while they are written
                    digest.update(view)
                self._calls.end(call)
        except FileExistsError:
            raise AlreadyExists(name) from None
        return WriteResult(sum(len(view) for view in views), digest.hexdigest())

    def get(self, name: str, digest: str | None = None) -> bytes:
        """The object. Raises NotFound, and DataLoss where it has another digest than `digest`."""
        check_name(name)
        try:
            content = self._call("read", partial(self._files.read, name), FileNotFoundError)
        except FileNotFoundError:
            raise NotFound(name) from None
        if digest is not None and blake3(content).hexdigest() != digest:
            raise DataLoss(name, f"its {len(content):,} bytes are not those that were written to {self.url}")
        return content

    def size(self, name: str) -> int:
        """Bytes of the object. Raises NotFound."""
        found = self._find(name)
        if found is None:
            raise NotFound(name)
        return found.num_bytes

    def exists(self, name: str) -> bool:
        return self._find(name) is not None

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """All objects below `folder`, in no order; none where there is no such folder. Those whose names end with PART
        were never put to their end. What others left there under names that no object may have is none of them."""
        if folder:
            check_name(folder)
        return iter(self._call("listed", lambda: [one for one in self._files.list(folder) if is_name(one.name)]))

    def delete(self, names: Iterable[str]) -> None:
        """One after the other; those that are missing are fine."""
        for name in names:
            check_name(name)
            self._call("deleted from", partial(self._files.remove, name))

    def _find(self, name: str) -> ObjectInfo | None:
        check_name(name)
        return self._call("read", partial(self._files.find, name))

    def _call(self, verb: str, work: Callable[[], Found], *passed: type[Exception]) -> Found:
        with _telling(self.url, verb, *passed):
            call: TimedCall[Found] = self._calls.begin(work)
            return self._calls.end(call)

    def _try(self) -> None:
        """Writes something, and deletes it, unless the storage is full."""
        try:
            self.put(PROBE, [b"longleaf"])
            self.delete([PROBE])
        except StorageUnavailable as error:
            if not _is_full(error.__cause__):
                raise


@contextmanager
def _telling(url: str, verb: str, *passed: type[Exception]) -> Generator[None, None, None]:
    """Turns whatever a driver raises into StorageUnavailable, but for `passed`."""
    try:
        yield
    except (LongleafError, MemoryError, *passed):
        raise
    except Exception as error:
        raise StorageUnavailable(f"{url} cannot be {verb}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What is wrong, and what to do."""
    if _is_full(error):
        return "it is full; make room there"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "it is read-only; mount it for writing"
    if isinstance(error, PermissionError):
        return "it is denied; check the credentials, and what they allow"
    reported = (error.strerror if isinstance(error, OSError) else "") or f"{error}" or type(error).__name__
    reported = re.sub(r"://[^/\s@]*@", "://", reported)  # drivers tell URLs with their passwords
    if isinstance(error, StorageTimeout):
        return f"{reported}; check that it can be reached from this machine"
    return f"{reported}; check that it is there, and can be reached from this machine"


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def _refusing() -> Generator[None, None, None]:
    """Turns into InvalidArgument what no wait mends."""
    try:
        yield
    except StorageUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, _WRONG) or (isinstance(cause, OSError) and cause.errno == errno.EROFS):
            raise InvalidArgument(FIELD, f"{error}") from cause
        raise

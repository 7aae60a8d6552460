"""In-memory storage, and storage with injected failures and hangs."""

import errno
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock, Semaphore

from longleaf.storage.files import ObjectInfo


class MemoryFiles:
    """Objects in memory. `clock` returns seconds since the Unix epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        content = b"".join(parts)
        with self._lock:
            if is_new and name in self._objects:
                raise FileExistsError(errno.EEXIST, "there is one", name)
            self._objects[name] = (content, self._clock())

    def read(self, name: str) -> bytes:
        with self._lock:
            if name not in self._objects:
                raise FileNotFoundError(errno.ENOENT, "there is none", name)
            return self._objects[name][0]

    def find(self, name: str) -> ObjectInfo | None:
        with self._lock:
            found = self._objects.get(name)
        return found and ObjectInfo(name, len(found[0]), found[1])

    def list(self, folder: str) -> Iterable[ObjectInfo]:
        with self._lock:
            found = sorted(self._objects.items())
        prefix = f"{folder}/" if folder else ""
        return [ObjectInfo(name, len(content), at) for name, (content, at) in found if name.startswith(prefix)]

    def remove(self, name: str) -> None:
        with self._lock:
            self._objects.pop(name, None)

    def num_bytes(self) -> int:
        """Total size of all objects."""
        return sum(entry.num_bytes for entry in self.list(""))


class FlakyFiles:
    """Objects of `files`, with injected failures."""

    def __init__(self, files: MemoryFiles) -> None:
        self.files = files
        self.is_answering = Event()
        """Calls block until it is set."""
        self.is_answering.set()
        self.begun = Semaphore(0)
        """Released by each call before it blocks."""
        self.max_bytes: int | None = None
        """Total capacity."""
        self._failures: list[Exception] = []
        self._torn_bytes: int | None = None

    def fail(self, num_calls: int, error: Exception | None = None) -> None:
        """Makes the next calls raise `error`, by default an OSError."""
        self._failures = [error or OSError(errno.EIO, "input/output error")] * num_calls

    def tear(self, num_bytes: int) -> None:
        """Makes the next write store only its first bytes, and raise."""
        self._torn_bytes = num_bytes

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        self._begin()
        if self._torn_bytes is not None:
            torn, self._torn_bytes = b"".join(parts)[: self._torn_bytes], None
            self.files.write(name, [memoryview(torn)], is_new)
            raise OSError(errno.ECONNRESET, "connection reset")
        if self.max_bytes is not None and self.files.num_bytes() + sum(map(len, parts)) > self.max_bytes:
            raise OSError(errno.ENOSPC, "no space left")
        self.files.write(name, parts, is_new)

    def read(self, name: str) -> bytes:
        self._begin()
        return self.files.read(name)

    def find(self, name: str) -> ObjectInfo | None:
        self._begin()
        return self.files.find(name)

    def list(self, folder: str) -> Iterable[ObjectInfo]:
        self._begin()
        return self.files.list(folder)

    def remove(self, name: str) -> None:
        self._begin()
        self.files.remove(name)

    def _begin(self) -> None:
        self.begun.release()
        self.is_answering.wait()
        if self._failures:
            raise self._failures.pop()

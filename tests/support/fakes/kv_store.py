"""A storage in a folder, for tests of members' writes and reads, in one process or several."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from blake3 import blake3

from longleaf.errors import DataLoss, NotFound, StorageUnavailable


def no_store(url: str) -> NoReturn:
    """An OpenStore that always fails."""
    raise StorageUnavailable(f"{url}: nothing is kept here")


class FakeWritten(NamedTuple):
    num_bytes: int
    digest: str


class FolderStore:
    """Objects as files below a folder. Calls wait while `gate` is closed, and fail with `error` as the reason if it
    is set.
    """

    def __init__(self, url: str) -> None:
        self.folder = Path(url)
        self.gate = threading.Event()
        self.gate.set()
        self.error = ""
        self.num_calls = threading.Semaphore(0)
        """The calls that have begun: acquiring the semaphore waits for one."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> FakeWritten:
        self._answer()
        content = b"".join(parts)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return FakeWritten(len(content), blake3(content).hexdigest())

    def get(self, name: str, digest: str | None = None) -> bytes:
        self._answer()
        if not (self.folder / name).exists():
            raise NotFound(name)
        content = (self.folder / name).read_bytes()
        if digest is not None and blake3(content).hexdigest() != digest:
            raise DataLoss(name, "its content does not match its checksum")
        return content

    def _answer(self) -> None:
        self.num_calls.release()
        self.gate.wait()
        if self.error:
            raise StorageUnavailable(self.error)

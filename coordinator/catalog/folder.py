"""The data folder: one folder in it for each model, which one service at a time has for its own."""

import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec
from filelock import FileLock, Timeout

from coordinator.catalog.database import FILE_MODE
from longleaf.errors import CatalogError

FOLDER_MODE = 0o700
FINGERPRINT_DIGITS = 32
LOCK, HOLDER, MODEL = "lock", "holder.json", "model.json"


class Holder(msgspec.Struct, frozen=True):
    """The service that has a folder for its own."""

    pid: int
    host: str
    address: str = ""
    """Where it listens, once that is known."""

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"process {self.pid} on {self.host}{where}"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a model, so that a later service can say what has changed since."""

    folder: str
    """Where it was read from."""
    fingerprint: str
    files: dict[str, str]
    """What was read of each file."""
    dtype: str = ""
    kv_dtype: str = ""


class DataFolder:
    """The folder of one model in a data folder, which is locked. The lock ends with the process that has it."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, data_dir: Path, facts: ModelFacts) -> Self:
        """Makes and locks the folder of a model. Raises CatalogError when that cannot be, or another service has
        it."""
        path = data_dir / facts.fingerprint[:FINGERPRINT_DIGITS]
        with _explained(path):
            for folder in (data_dir, path):
                _make(folder)
            lock = FileLock(path / LOCK, mode=FILE_MODE, thread_local=False)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise CatalogError(f"{path} is in use by {_read_holder(path)}: one service at a time may") from None
            opened = cls(path, lock)
            _write(path / HOLDER, Holder(os.getpid(), socket.gethostname()))
            _write(path / MODEL, facts)
        return opened

    def tell_address(self, address: str) -> None:
        """Has others who want the folder be told where its service listens. Raises CatalogError."""
        with _explained(self.path):
            _write(self.path / HOLDER, Holder(os.getpid(), socket.gethostname(), address))

    def siblings(self) -> list[tuple[Path, ModelFacts]]:
        """The folders of other models beside this one. What cannot be read is left out."""
        found = list[tuple[Path, ModelFacts]]()
        for path in sorted(self.path.parent.iterdir()):
            with suppress(OSError, msgspec.MsgspecError):
                if path != self.path:
                    found.append((path, msgspec.json.decode((path / MODEL).read_bytes(), type=ModelFacts)))
        return found

    def close(self) -> None:
        """Others may have the folder."""
        with suppress(OSError):
            (self.path / HOLDER).unlink(missing_ok=True)
        self._lock.release()


def _make(folder: Path) -> None:
    """Makes a folder that nobody else may look into. Raises CatalogError for one that is another user's."""
    folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise CatalogError(f"{folder} belongs to user {owner}, and this service runs as {os.geteuid()}")
    folder.chmod(FOLDER_MODE)


def _write(path: Path, content: Holder | ModelFacts) -> None:
    """Whoever reads it meanwhile sees what was there, or what is."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE), "wb") as file:
            file.write(msgspec.json.encode(content))
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _read_holder(path: Path) -> str:
    try:
        return str(msgspec.json.decode((path / HOLDER).read_bytes(), type=Holder))
    except (OSError, msgspec.MsgspecError):
        return "a service that does not say which"


@contextmanager
def _explained(path: Path) -> Generator[None, None, None]:
    """Turns what can be wrong with a folder into CatalogError."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        raise CatalogError(f"the data folder {path} cannot be used: {error}") from error

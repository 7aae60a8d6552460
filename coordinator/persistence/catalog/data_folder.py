"""The data folder, with one folder per model. One service at a time uses the folder of a model."""

import os
import socket
import stat
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock, Timeout

from coordinator.persistence.catalog.catalog import DATABASE
from coordinator.persistence.catalog.reserve import Reserve
from longleaf.durable_files import replace_file
from longleaf.errors import CatalogError

T = TypeVar("T")

DIGITS = 32
"""Number of digits of the fingerprint in the name of a folder."""
LOCK, HOLDER, MODEL = "lock", "holder.json", "model.json"
JOURNAL = "journal"
"""Folder of the journal of generations."""


class LockHolder(msgspec.Struct, frozen=True):
    """The process that uses a folder."""

    pid: int
    host: str
    address: str = ""
    """The address at which the process serves; empty until it serves."""

    def __str__(self) -> str:
        where = f", serving {self.address}" if self.address else ""
        return f"process {self.pid} on {self.host}{where}"


class ModelFile(msgspec.Struct, frozen=True):
    """The description of a folder's model."""

    model: str
    """The checkpoint, as named at the last start."""
    fingerprint: str
    facts: dict[str, str]
    """The inputs of the fingerprint, and other properties that distinguish the model."""


class DataFolder:
    """The folder of a model inside the data folder, locked until the process ends or until `close`."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        self.reserve = Reserve(path)
        """Disk space reserved for deletions and starts."""

    @classmethod
    def open(cls, data_dir: Path, fingerprint: str, model: str, facts: dict[str, str]) -> "DataFolder":
        """Create the missing folders with mode 0700, and lock the folder of the model. `fingerprint` is a hexadecimal
        digest.

        Raises CatalogError if another service, which the message names, uses the folder, or if the folder belongs to
        another user or cannot be written.
        """
        try:
            data_dir = data_dir.absolute()
            data_dir.parent.mkdir(parents=True, exist_ok=True)
            _make_own(data_dir)
            path = data_dir / fingerprint[:DIGITS]
            _make_own(path)
            folder = cls(path, _locked(path))
        except OSError as error:
            raise _unusable(data_dir, error) from error
        folder.reserve.prepare_start()
        try:
            model_file = ModelFile(model, fingerprint, facts)
            if _read(path / MODEL, ModelFile) != model_file:
                replace_file(path / MODEL, msgspec.json.encode(model_file))
            folder.record_address("")
        except OSError as error:
            folder.close()
            raise _unusable(path, error) from error
        return folder

    @property
    def database(self) -> Path:
        """The catalog file."""
        return self.path / DATABASE

    def record_address(self, address: str) -> None:
        """Record the address of this service, for the error message of another service that opens the folder. Raises
        OSError.
        """
        replace_file(self.path / HOLDER, msgspec.json.encode(LockHolder(os.getpid(), socket.gethostname(), address)))

    def other_models(self) -> list[tuple[Path, ModelFile]]:
        """Return the readable folders of other models in the data folder, sorted by name."""
        others = [folder for folder in sorted(self.path.parent.iterdir()) if folder != self.path]
        return [
            (folder, model_file) for folder in others if (model_file := _read(folder / MODEL, ModelFile)) is not None
        ]

    def close(self) -> None:
        """Release the folder for other services. Idempotent."""
        self._lock.release()


def _make_own(folder: Path) -> None:
    """Create the folder if it is missing. Raises CatalogError when it is a file, or belongs to another user."""
    try:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # restores bits removed by the umask
    except FileExistsError:
        pass
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise CatalogError(f"{folder} is a file: give a folder")
    if found.st_uid != os.geteuid():
        raise CatalogError(
            f"{folder} belongs to user {found.st_uid}, and this service runs as user {os.geteuid()}: the owner of a "
            f"folder can read and change its contents. Give another folder, or change the owner "
            f"(chown {os.geteuid()} {folder})"
        )


def _locked(folder: Path) -> FileLock:
    """Acquire the lock of a folder. The system releases it when the process ends."""
    lock = FileLock(folder / LOCK, timeout=0, mode=0o600, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        holder = _read(folder / HOLDER, LockHolder) or "another process"
        raise CatalogError(
            f"{folder} is in use by {holder}: stop that service, or give this one another --data-dir"
        ) from error
    return lock


def _unusable(folder: Path, error: OSError) -> CatalogError:
    place = error.filename or folder
    return CatalogError(
        f"{place} cannot be used: {error.strerror or error}. User {os.geteuid()} must be able to read and "
        f"write {folder} and its contents, on a disk that is not full, is writable, and supports locks"
    )


def _read(path: Path, kind: type[T]) -> "T | None":
    """Return None when the file is missing or has another format."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None

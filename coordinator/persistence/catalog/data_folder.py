"""The data folder: one folder in it for each model, which one service uses at a time."""

import os
import socket
import stat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

import msgspec
from filelock import FileLock, Timeout

from coordinator.persistence.catalog.catalog import DATABASE
from coordinator.persistence.catalog.database import sync_folder
from coordinator.persistence.catalog.reserve import Reserve
from longleaf.errors import CatalogError

T = TypeVar("T")

DIGITS = 32
"""Of a fingerprint, in the name of a folder."""
LOCK, HOLDER, MODEL = "lock", "holder.json", "model.json"
JOURNAL = "journal"
"""The folder of what is kept of answers."""


class LockHolder(msgspec.Struct, frozen=True):
    """The process that uses a folder."""

    pid: int
    host: str
    address: str = ""
    """Where it serves; empty until it does."""

    def __str__(self) -> str:
        where = f", serving {self.address}" if self.address else ""
        return f"process {self.pid} on {self.host}{where}"


class ModelFile(msgspec.Struct, frozen=True):
    """What a folder says of its model."""

    model: str
    """The checkpoint, as it was named at the last start."""
    fingerprint: str
    facts: dict[str, str]
    """What makes the fingerprint, and whatever else tells this model from others."""


class DataFolder:
    """A model's folder inside the data folder, locked for the life of the service or until `close`."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        self.reserve = Reserve(path)
        """Room that only deletions and starts may use."""

    @classmethod
    def open(cls, data_dir: Path, fingerprint: str, model: str, facts: dict[str, str]) -> "DataFolder":
        """Makes what is not there, with mode 0700, and locks it. `fingerprint` is a digest in hexadecimal digits.

        Raises CatalogError when another service uses it (and names that), when it belongs to another user, or cannot be
        written.
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
            reported = ModelFile(model, fingerprint, facts)
            if _read(path / MODEL, ModelFile) != reported:
                write_whole(path / MODEL, msgspec.json.encode(reported))
            folder.tell_address("")
        except OSError as error:
            folder.close()
            raise _unusable(path, error) from error
        return folder

    @property
    def database(self) -> Path:
        """The file of its catalog."""
        return self.path / DATABASE

    def tell_address(self, address: str) -> None:
        """Who comes later and wants this folder is told where the service is. Raises OSError."""
        write_whole(self.path / HOLDER, msgspec.json.encode(LockHolder(os.getpid(), socket.gethostname(), address)))

    def siblings(self) -> list[tuple[Path, ModelFile]]:
        """The folders of other models in the data folder, in the order of their names; those that cannot be read are
        left out."""
        others = [folder for folder in sorted(self.path.parent.iterdir()) if folder != self.path]
        return [(folder, reported) for folder in others if (reported := _read(folder / MODEL, ModelFile)) is not None]

    def close(self) -> None:
        """Another service may use it from now on. Idempotent."""
        self._lock.release()


def _make_own(folder: Path) -> None:
    """Makes the folder if it is not there. Raises CatalogError when it is none, or somebody else's."""
    try:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask took away
    except FileExistsError:
        pass
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise CatalogError(f"{folder} is a file: give a folder to keep contexts in")
    if found.st_uid != os.geteuid():
        raise CatalogError(
            f"{folder} belongs to user {found.st_uid}, and this service runs as user {os.geteuid()}: who owns a folder "
            f"can read and change what is kept there. Give a folder of its own, or change the owner "
            f"(chown {os.geteuid()} {folder})"
        )


def _locked(folder: Path) -> FileLock:
    """The lock of a folder, taken: the system lets go of it when the process ends, however that ends."""
    lock = FileLock(folder / LOCK, timeout=0, mode=0o600, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        holder = _read(folder / HOLDER, LockHolder) or "another process"
        raise CatalogError(
            f"{folder} is used by {holder}: end that service, or give this one another --data-dir"
        ) from error
    return lock


def _unusable(folder: Path, error: OSError) -> CatalogError:
    place = error.filename or folder
    return CatalogError(
        f"{place} cannot be used: {error.strerror or error}. User {os.geteuid()} needs the permission to read and "
        f"write {folder} and all that is in it, on a disk that is neither full nor read-only and knows locks"
    )


def write_whole(path: Path, content: bytes) -> None:
    """The file has this content, or that which it had, whatever happens; its mode is 0600. Raises OSError."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    sync_folder(path.parent)


def _read(path: Path, kind: type[T]) -> "T | None":
    """None when it is not there, or says something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None

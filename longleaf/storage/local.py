"""Objects as files in a local folder, written atomically."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from longleaf.durable_files import sync_folder
from longleaf.storage.files import PART, ObjectInfo

_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_TRIES = 100
"""Attempts to create a file in a folder that others delete whenever it is empty."""


class LocalFiles:
    """Files in the folder `root`, which is created. Writes are durable.

    Folders and files are accessible only to this user.
    """

    def __init__(self, root: Path) -> None:
        _make_folders(root)
        self._root = root

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        path = self._root / name
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PART}")
        try:
            _write_durably(self._create(part), parts)
            if is_new:
                os.link(part, path)  # a rename would overwrite an existing file
                os.unlink(part)
            else:
                os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        try:
            sync_folder(path.parent)
        except FileNotFoundError:  # another caller has deleted the object and its folder
            self._check_root()

    def read(self, name: str) -> bytes:
        try:
            with (self._root / name).open("rb", buffering=0) as file:
                return file.readall()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_root()
            raise FileNotFoundError(errno.ENOENT, "there is none", name) from None

    def find(self, name: str) -> ObjectInfo | None:
        try:
            found = (self._root / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            return None
        return _entry(name, found) if stat.S_ISREG(found.st_mode) else None

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        self._check_root()
        yield from _walk(self._root / folder, f"{folder}/" if folder else "")

    def remove(self, name: str) -> None:
        """Removes empty folders as well. A folder in place of the object is ignored."""
        path = self._root / name
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
        self._check_root()
        for folder in path.parents[: name.count("/")]:
            try:
                folder.rmdir()
            except FileNotFoundError:  # removed concurrently
                continue
            except OSError:  # it is not empty
                break

    def _create(self, path: Path) -> int:
        """Opens a new file. Retries if its folder is deleted as empty before the file exists."""
        for _ in range(_TRIES):
            try:
                return os.open(path, _CREATE, 0o600)
            except FileNotFoundError:
                self._check_root()
                with suppress(FileNotFoundError):
                    _make_folders(path.parent)
        raise OSError(errno.EBUSY, "its folder was deleted each time it was created")

    def _check_root(self) -> None:
        """Without its folder the storage is unavailable, for instance an unmounted disk, and objects must not be
        reported as missing."""
        if not self._root.is_dir():
            raise OSError(errno.ENXIO, "the folder no longer exists")


def _walk(folder: Path, prefix: str) -> Iterator[ObjectInfo]:
    try:
        found = sorted(os.scandir(folder), key=lambda item: item.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for item in found:
        if item.is_dir(follow_symlinks=False):
            yield from _walk(folder / item.name, f"{prefix}{item.name}/")
        elif item.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):  # deleted meanwhile
                yield _entry(prefix + item.name, item.stat(follow_symlinks=False))


def _entry(name: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, found.st_size, found.st_mtime)


def _write_durably(descriptor: int, parts: Sequence[memoryview]) -> None:
    """Writes all bytes with fsync, and closes the file."""
    try:
        for part in parts:
            rest = part
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders(folder: Path) -> None:
    """Creates missing folders durably, starting at the top."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    sync_folder(folder.parent)

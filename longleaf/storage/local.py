"""Objects as files of a folder of this machine, each there as a whole or not at all."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from longleaf.storage.files import PART, ObjectInfo

_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_TRIES = 100
"""Of making a file in a folder that others delete as soon as it is empty."""


class LocalFiles:
    """Files of the folder `root`, which is made. They survive the machine's power as soon as they are written.

    Folders and files belong to this user alone.
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
                os.link(part, path)  # a rename would replace what is there
                os.unlink(part)
            else:
                os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        try:
            _sync_folder(path.parent)
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
        """Folders that became empty go with it. One in place of the object is none."""
        path = self._root / name
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
        self._check_root()
        for folder in path.parents[: name.count("/")]:
            try:
                folder.rmdir()
            except FileNotFoundError:  # somebody else was faster
                continue
            except OSError:  # it is not empty
                break

    def _create(self, path: Path) -> int:
        """Opens a new file. Its folder may be deleted, because it is empty, before the file is there."""
        for _ in range(_TRIES):
            try:
                return os.open(path, _CREATE, 0o600)
            except FileNotFoundError:
                self._check_root()
                with suppress(FileNotFoundError):
                    _make_folders(path.parent)
        raise OSError(errno.EBUSY, "its folder vanishes as often as it is made")

    def _check_root(self) -> None:
        """Without its folder nothing is missing: the storage is away, as where a disk is not mounted."""
        if not self._root.is_dir():
            raise OSError(errno.ENXIO, "the folder is not there any more")


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
    """Writes all bytes to the disk, and closes the file."""
    try:
        for part in parts:
            rest = part
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders(folder: Path) -> None:
    """Makes those that are missing, from the top on, durably."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """What was made and renamed in it stays so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic replacement of files. A crash of the machine leaves either the old file or the complete new one."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace the content of a file, or create it. Raises OSError."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    sync_folder(path.parent)


def rename_file(source: Path, target: Path) -> None:
    """Rename a file, whose content must be synced already, within its file system. Raises OSError."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names of the files in a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

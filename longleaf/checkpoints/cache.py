"""The cache of downloaded and converted checkpoints, and the writing of folders in it."""

import shutil
from pathlib import Path

from longleaf.config import cache_folder
from longleaf.errors import StartError


def models_cache() -> Path:
    """Folder of downloaded and converted checkpoints."""
    return cache_folder() / "models"


def locked(folder: Path):
    """A lock that processes hold while they write `folder`. Creates the parent folder.

    Raises StartError if that cannot be written.
    """
    from filelock import FileLock  # installed with the server

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(folder.with_name(folder.name + ".lock"))
    except OSError as error:
        raise StartError(f"the cache {folder.parent} cannot be written: {error.strerror}") from error


def empty_partial(folder: Path) -> Path:
    """The path at which `folder` is written before it is renamed. What an interrupted process left there is removed."""
    partial = folder.with_name(f".{folder.name}.longleaf-partial")
    shutil.rmtree(partial, ignore_errors=True)
    return partial

"""Copies of checkpoint folders from storage that fsspec supports."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from longleaf.checkpoints.cache import empty_partial, locked, models_cache
from longleaf.checkpoints.interaction import Interaction
from longleaf.errors import StartError, Unavailable
from longleaf.fingerprint import CONFIG
from longleaf.storage.urls import redact_url


def copy_to_cache(url: str, interaction: Interaction) -> Path:
    """The copy of the folder at `url` in the cache; copies it if there is none. A copy is not refreshed."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    folder = models_cache() / f"url-{digest}" / (url.rstrip("/").rpartition("/")[2] or "model")
    with locked(folder):
        if folder.is_dir():
            interaction.notify(f"using the copy of {redact_url(url)} in {folder}; delete it to copy again")
        else:
            interaction.notify(f"copying {redact_url(url)} to {folder} …")
            partial = copy_to_partial(url, folder)
            if not (partial / CONFIG).is_file():
                shutil.rmtree(partial, ignore_errors=True)
                raise StartError(f"{redact_url(url)} has no {CONFIG}: it is not the folder of a checkpoint")
            partial.rename(folder)
    return folder


def copy_to_partial(url: str, folder: Path) -> Path:
    """Copies the folder at `url` into a temporary folder beside `folder`, and returns that.

    Raises StartError for an unsupported kind of storage, and Unavailable if the folder cannot be read.
    """
    partial = empty_partial(folder)
    storages = _storages()
    try:
        storage, path = storages.core.url_to_fs(url)
        storage.get(path.rstrip("/") + "/", f"{partial}/", recursive=True)
    except (ValueError, ImportError) as error:
        raise StartError(str(error)) from error
    except Exception as error:  # each kind of storage has its own errors
        shown = redact_url(url)
        reason = str(error).replace(url.rstrip("/"), shown.rstrip("/"))
        raise Unavailable(f"{shown} cannot be read: {type(error).__name__}: {reason}") from error
    return partial


def _storages() -> Any:
    """The package fsspec, imported late because only this module needs it."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    return fsspec

"""`longleaf models fetch`."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from longleaf.errors import InvalidArgument, Unavailable
from longleaf.extras import require_extra
from longleaf.fingerprint import read_fingerprint

PARTIAL = ".partial"


def fetch(
    url: Annotated[
        str, typer.Argument(help="URL of the checkpoint folder, for fsspec: hf://, s3://, https:// or file://.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    fingerprint: Annotated[
        str | None, typer.Option(help="Required fingerprint of the checkpoint.", show_default="any", metavar="HASH")
    ] = None,
) -> None:
    """Copy a checkpoint from storage into a folder, and print its fingerprint.

    The download uses a temporary folder until it is complete. An existing folder is checked, and not fetched again.
    Exit code 2: the fingerprint differs from --fingerprint; 1: the storage cannot be read.

    Examples:

      longleaf models fetch hf://HuggingFaceTB/SmolLM2-135M-Instruct ./smollm
      longleaf models fetch s3://models/Qwen3-8B /models/Qwen3-8B
    """
    require_extra("server", "longleaf models fetch")
    if folder.exists():
        typer.echo(f"{folder} exists: {_checked(folder, fingerprint)}")
        return
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted fetch
    _copy(url, partial)
    digest = _checked(partial, fingerprint)
    partial.rename(folder)
    typer.echo(f"{folder}: {digest}")


def _storages() -> Any:
    """The package fsspec, imported late because only this command needs it."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    return fsspec


def _copy(url: str, folder: Path) -> None:
    """Raises InvalidArgument for an unsupported kind of storage, and Unavailable if the folder cannot be read."""
    storages = _storages()
    try:
        storage, path = storages.core.url_to_fs(url)
        storage.get(path.rstrip("/") + "/", f"{folder}/", recursive=True)
    except (ValueError, ImportError) as error:
        raise InvalidArgument("url", str(error)) from error
    except Exception as error:  # each kind of storage has its own errors
        raise Unavailable(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _checked(folder: Path, wanted: str | None) -> str:
    """The folder's fingerprint. Raises ModelRefused if it has none, and InvalidArgument if it differs from `wanted`."""
    digest = read_fingerprint(folder).digest
    if wanted and digest != wanted:
        raise InvalidArgument("fingerprint", f"{folder} has {digest}, not {wanted}")
    return digest

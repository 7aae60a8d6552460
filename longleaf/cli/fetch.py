"""`longleaf models fetch`."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from longleaf.errors import InvalidArgument, Unavailable
from longleaf.fingerprint import read_fingerprint

PARTIAL = ".partial"


def fetch(
    url: Annotated[str, typer.Argument(help="Folder of the checkpoint, as fsspec names it: s3://, https://, file://.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes.")],
    fingerprint: Annotated[str | None, typer.Option(help="The fingerprint that it must have.")] = None,
) -> None:
    """Copy a checkpoint from storage into a folder, which is there as a whole or not at all.

    A folder that is there already is looked at, and not fetched again. Prints the fingerprint. Exit code 2: it is
    another one than was asked for; 1: the storage does not answer.

    Example: longleaf models fetch s3://models/Qwen3-8B /models/Qwen3-8B
    """
    if folder.exists():
        typer.echo(f"{folder} is there: {_checked(folder, fingerprint)}")
        return
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # what an earlier try left
    _copy(url, partial)
    digest = _checked(partial, fingerprint)
    partial.rename(folder)
    typer.echo(f"{folder}: {digest}")


def _storages() -> Any:
    """The package, untyped, and imported late: no other command needs it."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    return fsspec


def _copy(url: str, folder: Path) -> None:
    """Raises InvalidArgument for storage that nothing here speaks to, and Unavailable for what cannot be read."""
    storages = _storages()
    try:
        storage, path = storages.core.url_to_fs(url)
        storage.get(path.rstrip("/") + "/", f"{folder}/", recursive=True)
    except (ValueError, ImportError) as error:
        raise InvalidArgument("url", str(error)) from error
    except Exception as error:  # each storage has its own
        raise Unavailable(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _checked(folder: Path, wanted: str | None) -> str:
    """The folder's fingerprint. Raises ModelRefused when it has none, and InvalidArgument when it is another."""
    digest = read_fingerprint(folder).digest
    if wanted and digest != wanted:
        raise InvalidArgument("fingerprint", f"{folder} has {digest}, not {wanted}")
    return digest

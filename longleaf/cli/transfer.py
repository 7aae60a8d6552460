"""`longleaf contexts export` and `import`."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from longleaf.cli.flags import takes_server
from longleaf.cli.ingest import PATIENT
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_bytes
from longleaf.types import Context, ExportProgress, ImportProgress

STANDARD = "-"
"""Argument for standard input or output."""
OnBytes = Callable[[int, int | None], None]
"""Called with the number of transferred bytes, and the total."""


@takes_server
def export_context(
    name: Annotated[str, typer.Argument(help="Name of the context.")],
    file: Annotated[str, typer.Argument(help="The file to write; - is standard output.", metavar="FILE")],
    server: ServerOptions,
    without_keys: Annotated[
        bool,
        typer.Option(
            "--without-keys", help="Export only token ids and settings; keys and values are computed after the import."
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted export from FILE.part.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Time limit for the whole export.", show_default="no limit", metavar="SECONDS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a context to a file.

    The file contains the keys and values that are in storage. Any other service with the same model can import it; the
    number of ranks may differ.

    Example: longleaf contexts export book book.context
    """
    is_piped = file == STANDARD
    if is_piped and (resume or as_json):
        option = "--resume" if resume else "--json"
        raise InvalidArgument(option, "cannot be combined with -")
    with connect(server, retries=PATIENT) as client, bytes_bar("exporting", is_shown=not as_json) as show:

        def on_progress(progress: ExportProgress) -> None:
            show(progress.received_bytes, progress.archive.num_bytes)

        target = sys.stdout.buffer if is_piped else Path(file)
        archive = client.export_context(
            name, target, with_keys=not without_keys, resume=resume, on_progress=on_progress, timeout=timeout
        )
    if as_json:
        print_json({"context": name, "file": file, "num_bytes": archive.num_bytes, "digest": archive.digest})
    elif not is_piped:
        print(f"{name}: {human_bytes(archive.num_bytes)} in {file}")


@takes_server
def import_context(
    file: Annotated[
        str, typer.Argument(help="A file that `contexts export` has written; - is standard input.", metavar="FILE")
    ],
    server: ServerOptions,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the new context.", show_default="the exported name")
    ] = None,
    upload_id: Annotated[
        str,
        typer.Option(
            help="Make the import resumable: after an interruption, the same command continues it.",
            show_default="",
            metavar="ID",
        ),
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(help="Time limit for the whole import.", show_default="no limit", metavar="SECONDS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import a context from a file.

    The file was exported by a service with the same model. The keys and values are loaded on the first request.

    Example: longleaf contexts import book.context --name book
    """
    from longleaf.client.documents import size_of

    source = sys.stdin.buffer if file == STANDARD else Path(file)
    total, reports = size_of(source), list[ImportProgress]()
    with (
        _file_named(file),
        connect(server, retries=PATIENT) as client,
        bytes_bar("importing", is_shown=not as_json) as show,
    ):

        def on_progress(progress: ImportProgress) -> None:
            reports[:] = [progress]
            show(progress.received_bytes, total)

        context = client.import_context(source, name, upload_id=upload_id, on_progress=on_progress, timeout=timeout)
    if as_json:
        print_json({"context": context, "key_tokens": reports[-1].key_tokens})
    else:
        print(summary(context, reports[-1].key_tokens))


@contextmanager
def _file_named(file: str) -> Generator[None, None, None]:
    """Replaces the field in errors about the archive by the name of the file."""
    try:
        yield
    except InvalidArgument as error:
        if error.field == "archive":
            raise InvalidArgument("standard input" if file == STANDARD else file, error.description) from None
        raise


def summary(context: Context, num_keys: int | None) -> str:
    """The size of an imported context, and the origin of its keys and values."""
    if num_keys is None:
        how = "already imported"
    elif num_keys == context.tokens:
        how = "keys and values are loaded on the first request"
    elif num_keys == 0:
        how = "keys and values are computed on the first request"
    else:
        rest = context.tokens - num_keys
        how = f"on the first request, {num_keys:,} of them are loaded and {rest:,} computed"
    return f"{context.id}: {context.tokens:,} tokens; {how}"


@contextmanager
def bytes_bar(description: str, is_shown: bool) -> Generator[OnBytes, None, None]:
    """A progress bar on stderr for bytes."""
    columns = ("{task.description:<12}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, disable=not is_shown, redirect_stdout=False)
    task = progress.add_task(description, total=None)

    def show(num_bytes: int, total: int | None) -> None:
        progress.start()  # not earlier: a call that is refused shows no bar
        progress.update(task, completed=num_bytes, total=total)

    try:
        yield show
    except BaseException:
        progress.live.transient = True  # the error replaces the bar
        progress.live.stop()
        raise
    finally:
        if progress.live.is_started:
            progress.stop()

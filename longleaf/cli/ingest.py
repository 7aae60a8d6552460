"""`longleaf ingest`."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from longleaf.cli.document_files import empty_files, objection
from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.cli.token_files import TokenFormat, read_ids
from longleaf.client.callbacks import OnProgress
from longleaf.client.documents import size_of
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_bytes
from longleaf.topology import count_ranks
from longleaf.types import Context, IngestOptions, IngestProgress

PATIENT = 8
"""Retries of an upload, which may have taken long, while it gets no further."""


@takes_server
def ingest(
    files: Annotated[
        list[str],
        typer.Argument(
            help="UTF-8 text files, read as one with nothing between; - is standard input.", metavar="FILE..."
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="Name of the context.")],
    server: ServerOptions,
    append: Annotated[bool, typer.Option("--append", help="Append to an existing context.")] = False,
    system: Annotated[
        str,
        typer.Option(
            help="What the model is told before it reads the document, such as how to answer. It stays in the context, "
            "and goes where the model's chat template puts a system's message.",
            metavar="TEXT",
            show_default="",
        ),
    ] = "",
    token_ids: Annotated[
        TokenFormat | None,
        typer.Option(
            help="The files hold token ids: a JSON list, or little-endian numbers. They are used as they are.",
            show_default="text",
        ),
    ] = None,
    upload_id: Annotated[
        str, typer.Option(help="Makes the ingest resumable: the same command goes on where it broke.", show_default="")
    ] = "",
    ttl: Annotated[
        float | None, typer.Option(help="Seconds until the service deletes the context.", show_default="never")
    ] = None,
    display_name: Annotated[str, typer.Option(help="A name for people.", show_default="")] = "",
    pin: Annotated[bool, typer.Option("--pin", help="Do not let it expire, nor be parked to make room.")] = False,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    client: Annotated[str, typer.Option(help="Whom a fair share is counted for.", show_default="this machine")] = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds for all of it.", show_default="no limit")] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            help="Most tokens that the context will ever have, with what is appended, asked and answered.",
            show_default="131072, or all that the model can for long documents",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ingest a document: its keys and values stay spread over the ranks, ready for any number of questions.

    Example: longleaf ingest book.txt appendix.txt --name book
    """
    given = {"ttl": ttl, "display_name": display_name or None, "is_pinned": pin or None, "capacity": capacity}
    given |= {"append": append, "upload_id": upload_id, "priority": priority, "client": client, "timeout": timeout}
    given |= {"system": system}
    options = cast(IngestOptions, {key: value for key, value in given.items() if value is not None})
    texts = [sys.stdin.buffer if file == "-" else Path(file) for file in files]
    total = size_of(texts)  # whatever they hold: a file that is not there is told before anything is sent
    document = read_ids(files, token_ids) if token_ids else texts
    if len(files) > 1:
        for file in empty_files(files):
            print(f"{file} is empty", file=sys.stderr)
    with (
        _files_named(files),
        connect(server, retries=PATIENT) as service,
        progress_bar(None if token_ids else total, is_shown=not as_json) as on_progress,
    ):
        context = service.ingest(name, document, on_progress=on_progress, **options)
    if as_json:
        print_json(context)
    else:
        print(summary(context))


@contextmanager
def _files_named(files: list[str]) -> Generator[None, None, None]:
    """What is wrong with the document is said of the files."""
    try:
        yield
    except InvalidArgument as error:
        if error.field == "text" and (found := objection(files)) is not None:
            raise found from None
        if error.field.partition(".")[0] in ("text", "token_ids"):
            names = ", ".join("standard input" if file == "-" else file for file in files)
            raise InvalidArgument(names, error.description) from None
        raise


def summary(context: Context) -> str:
    resident = human_bytes(context.kv_bytes)
    ranks = f" on {count_ranks(sum(share.tokens > 0 for share in context.shares))}" if context.shares else ""
    called = f" ({context.display_name})" if context.display_name else ""
    return f"{context.id}{called}: {context.tokens:,} tokens, {resident} of keys and values{ranks}"


@contextmanager
def progress_bar(total_bytes: int | None, is_shown: bool = True) -> Generator[OnProgress, None, None]:
    """A bar on stderr that follows an ingest: bytes going up, then tokens with their speed and the time left."""
    progress = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
    )
    task = progress.add_task("sending", total=total_bytes, note="")

    def show(report: IngestProgress) -> None:
        progress.start()  # not before: what is refused at once needs no bar
        _show(progress, task, report)

    try:
        yield show
    except BaseException:
        progress.live.transient = True  # an error is not told below a bar that stands still
        progress.live.stop()
        raise
    finally:
        if progress.live.is_started:
            progress.stop()


def _show(progress: Progress, task: TaskID, report: IngestProgress) -> None:
    is_text = report.received_bytes > 0 or not report.received_tokens
    received = human_bytes(report.received_bytes) if is_text else f"{report.received_tokens:,} tokens"
    match report.phase:
        case "receiving":
            progress.update(task, description="sending", completed=report.received_bytes, note=received)
        case "tokenizing":
            progress.update(task, description="tokenizing", note=received)
        case "unspecified":
            progress.update(task, description="working", note=received)
        case "recovering" if report.recovering is not None:
            recovered, total = report.recovering.recovered_tokens, report.recovering.total_tokens
            note = f"{recovered:,} of {total:,} tokens" if total else f"{report.recovering.lost_tokens:,} tokens to go"
            progress.update(task, description="recovering", note=note)
        case "prefilling" if report.processed == 0:
            # A new measure: the estimate of the time left must forget the bytes.
            progress.reset(task, description="reading", total=report.total, note=f"{report.total:,} tokens")
        case _:
            note = f"{report.processed:,} of {report.total:,} tokens, {report.tokens_per_second:,.0f}/s"
            progress.update(task, description="reading", completed=report.processed, note=note)

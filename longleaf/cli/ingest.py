"""`longleaf ingest`."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from longleaf.cli.document_files import choose_name, collect, named_files, report_collection, text_paths
from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.cli.token_files import TokenFormat, read_ids
from longleaf.formatting import human_bytes
from longleaf.topology import count_ranks
from longleaf.types import Context, IngestOptions, IngestProgress

if TYPE_CHECKING:
    from longleaf.client.callbacks import OnProgress

PATIENT = 8
"""Maximum number of retries of an upload without progress."""


@takes_server
def ingest(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Text files, PDF, .docx, .pptx, HTML, EPUB, notebooks, zip and tar archives, or folders; - is "
            "standard input.",
            metavar="FILE...",
        ),
    ],
    server: ServerOptions,
    name: Annotated[
        str,
        typer.Option(
            "--name", help="Name of the context.", show_default="the name of the file or folder, if one is given"
        ),
    ] = "",
    append: Annotated[bool, typer.Option("--append", help="Append to an existing context.")] = False,
    system: Annotated[
        str,
        typer.Option(
            help="Instructions for the model, such as how to answer. They become the system message before the "
            "document, and stay in the context.",
            metavar="TEXT",
            show_default="",
        ),
    ] = "",
    file_headers: Annotated[
        bool | None,
        typer.Option(
            "--file-headers/--no-file-headers",
            help="Begin the text of each file with a line with its name, so that the model can attribute "
            "statements to files. Without these lines, files are joined without a separator.",
            show_default="with several files",
        ),
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="Charset of text files, such as iso-8859-1. A byte order mark takes precedence.",
            show_default="utf-8",
            metavar="CHARSET",
        ),
    ] = "",
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="Ingest HTML pages and notebooks as they are, with all markup.")
    ] = False,
    token_ids: Annotated[
        TokenFormat | None,
        typer.Option(
            help="Read token ids from the files instead of text: a JSON list, or little-endian numbers.",
            show_default="text",
        ),
    ] = None,
    upload_id: Annotated[
        str,
        typer.Option(
            help="Make the ingest resumable: after an interruption, the same command continues it.",
            show_default="",
            metavar="ID",
        ),
    ] = "",
    ttl: Annotated[
        float | None,
        typer.Option(help="Time until the service deletes the context.", show_default="never", metavar="SECONDS"),
    ] = None,
    display_name: Annotated[str, typer.Option(help="Free text shown beside the name.", show_default="")] = "",
    pin: Annotated[
        bool, typer.Option("--pin", help="Protect the context from expiry, and from eviction from memory.")
    ] = False,
    priority: Annotated[int, typer.Option(help="Requests of higher priority run first.")] = 0,
    client: Annotated[
        str,
        typer.Option(
            help="Id for fair scheduling: each id gets an equal share of the service.",
            show_default="this machine",
            metavar="ID",
        ),
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(help="Time limit for the whole ingest.", show_default="no limit", metavar="SECONDS")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            help="Maximum length of the context, including appended text, questions and answers.",
            show_default="131,072 tokens, or the model's limit if the document is longer",
            metavar="TOKENS",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ingest files and folders as a context.

    The service reads the document once, and keeps its attention keys and values, so that any number of questions can be
    asked about it. The text of files that are not plain text is extracted on this machine, in a confined process.

    Of a folder, hidden files, links, files excluded by .gitignore and files without text are left out, and counted.

    Examples:

      longleaf ingest book.txt
      longleaf ingest report.pdf slides.pptx notes/ --name work
    """
    from longleaf.client.documents import size_of

    name = choose_name(name, files, append)
    given = {"ttl": ttl, "display_name": display_name or None, "is_pinned": pin or None, "capacity": capacity}
    given |= {"append": append, "upload_id": upload_id, "priority": priority, "client": client, "timeout": timeout}
    given |= {"system": system}
    options = cast(IngestOptions, {key: value for key, value in given.items() if value is not None})
    if token_ids:
        paths = [sys.stdin.buffer if file == "-" else Path(file) for file in files]
        size_of(paths)  # reports a missing file before any is read
        document, total, sent = read_ids(files, token_ids), None, list[Path]()
    else:
        collection = collect(files, encoding=encoding, as_text=plain_text, is_shown=not as_json)
        report_collection(collection, name)
        document = collection.parts(file_headers)
        total, sent = size_of(document), text_paths(collection)
    with (
        named_files(files, sent),
        connect(server, retries=PATIENT) as service,
        progress_bar(total, is_shown=not as_json) as on_progress,
    ):
        context = service.ingest(name, document, on_progress=on_progress, **options)
    if as_json:
        print_json(context)
    else:
        print(summary(context))


def summary(context: Context) -> str:
    """One line with the name, the length and the memory of a context."""
    resident = human_bytes(context.kv_bytes)
    ranks = f" on {count_ranks(sum(share.tokens > 0 for share in context.shares))}" if context.shares else ""
    called = f" ({context.display_name})" if context.display_name else ""
    return f"{context.id}{called}: {context.tokens:,} tokens, {resident} of keys and values{ranks}"


@contextmanager
def progress_bar(total_bytes: int | None, is_shown: bool = True) -> Generator["OnProgress", None, None]:
    """A progress bar on stderr: bytes of the upload, then tokens with their rate and the remaining time."""
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
        progress.start()  # not earlier: an ingest that is refused shows no bar
        _show(progress, task, report)

    try:
        yield show
    except BaseException:
        progress.live.transient = True  # the error replaces the bar
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
            note = f"{recovered:,} of {total:,} tokens" if total else f"{report.recovering.lost_tokens:,} tokens left"
            progress.update(task, description="restoring", note=note)
        case "prefilling" if report.processed == 0:
            # The unit changes from bytes to tokens, so the estimate of the remaining time must restart.
            progress.reset(task, description="reading", total=report.total, note=f"{report.total:,} tokens")
        case _:
            note = f"{report.processed:,} of {report.total:,} tokens, {report.tokens_per_second:,.0f}/s"
            progress.update(task, description="reading", completed=report.processed, note=note)

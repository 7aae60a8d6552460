"""`longleaf contexts`."""

import sys
from datetime import datetime
from typing import Annotated, cast

import typer
from rich.table import Table

from longleaf.cli import transfer
from longleaf.cli.console import output_console
from longleaf.cli.flags import takes_server
from longleaf.cli.help import CommandGroup
from longleaf.cli.ingest import summary
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.cli.rebuild import rebuild
from longleaf.cli.recompute import recompute
from longleaf.document_text import is_place
from longleaf.documents.text_files import without_controls
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_angle, human_bytes, human_count, printable
from longleaf.types import Context, ContextOptions, ContextText, PositionInfo

app = CommandGroup(help="List, show, fork, change, export, import and delete contexts.")
FIRST_TOKENS = 256
"""Tokens that `contexts text` shows by default."""
Name = Annotated[str, typer.Argument(help="Name of the context.")]
app.command("rebuild")(rebuild)
app.command("recompute")(recompute)


@app.command("list")
@takes_server
def list_contexts(server: ServerOptions, as_json: AsJson = False) -> None:
    """List all contexts.

    Example: longleaf contexts list
    """
    with connect(server) as client:
        contexts = client.list_contexts()
    if as_json:
        print_json({"contexts": contexts})
        return
    if not contexts:
        print("no contexts; `longleaf ingest FILE --name NAME` creates one")
        return
    table = Table("name", "tokens", "state", "memory", "storage", "last use", "requests", "expires")
    for context in contexts:
        expires = "never" if context.expires is None else _date(context.expires)
        sizes = (human_bytes(context.kv_bytes), human_bytes(context.storage_bytes))
        used = (_date(context.used), f"{context.hits:,}", "pinned" if context.is_pinned else expires)
        table.add_row(context.id, f"{context.tokens:,}", context.state, *sizes, *used)
    output_console().print(table)


@app.command("show")
@takes_server
def show_context(name: Name, server: ServerOptions, as_json: AsJson = False) -> None:
    """Show one context, and the tokens that each rank holds.

    Example: longleaf contexts show book
    """
    with connect(server) as client:
        context = client.get_context(name)
    if as_json:
        print_json(context)
        return
    print(summary(context))
    print(lifetime(context))
    print(describe_use(context))
    print(positions(context.positions))
    if context.shares:
        output_console().print(shares_table(context))


@app.command("text")
@takes_server
def show_text(
    name: Name,
    server: ServerOptions,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens A to B - 1, counted from 0.", metavar="A-B", show_default=f"the first {FIRST_TOKENS} tokens"
        ),
    ] = None,
    of_bytes: Annotated[
        str | None,
        typer.Option(
            "--bytes", help="Bytes A to B - 1 of the ingested text, counted from 0.", metavar="A-B", show_default=""
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a part of the text of a context, and its position.

    The service stores no text: it decodes the tokens.

    Examples:

      longleaf contexts text book
      longleaf contexts text book --tokens 4096-4160
    """
    if tokens is not None and of_bytes is not None:
        raise InvalidArgument("text", "give --tokens or --bytes, not both")
    token_start, token_end = _range("--tokens", tokens)
    byte_start, byte_end = _range("--bytes", of_bytes)
    with connect(server) as client:
        if tokens is None and of_bytes is None:
            token_start, token_end = 0, min(FIRST_TOKENS, client.get_context(name).tokens)
        text = client.get_context_text(name, token_start, token_end, byte_start=byte_start, byte_end=byte_end)
    if as_json:
        print_json(text)
    else:
        print(without_controls(text.text) if sys.stdout.isatty() else text.text)
        print(_place(text), file=sys.stderr)


def _range(option: str, value: str | None) -> tuple[int | None, int | None]:
    if value is None:
        return None, None
    start, _, end = value.partition("-")
    if not (start.isdecimal() and end.isdecimal()):
        raise InvalidArgument(option, f"{value!r} is not A-B with two integers")
    return int(start), int(end)


def _place(text: ContextText) -> str:
    """The file, line and range of a text."""
    where = f"tokens {text.token_start:,} to {text.token_end:,}"
    if text.byte_start is not None and text.byte_end is not None:
        where += f", bytes {text.byte_start:,} to {text.byte_end:,}"
    line = f"line {text.line:,}" if text.line is not None and not is_place(text.file) else ""
    return ", ".join(part for part in (printable(text.file), line, where) if part)


@app.command("fork")
@takes_server
def fork_context(
    name: Name,
    new_name: Annotated[str, typer.Argument(help="Name of the new context.")],
    server: ServerOptions,
    tokens: Annotated[
        int | None, typer.Option(help="Length of the new context.", show_default="all tokens", metavar="TOKENS")
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Where the context cannot be continued, compute the tokens after the nearest position before again.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a context from another one, or from its beginning.

    Nothing is copied: both contexts share the keys and values of the common tokens. Models with recurrent states can be
    continued at the ends of documents only; elsewhere the fork is refused, unless --recompute is given.

    Example: longleaf contexts fork book draft --tokens 5000
    """
    with connect(server) as client:
        context = client.fork_context(name, new_name, num_tokens=tokens, recompute=recompute)
    _show(context, as_json)
    if context.recomputed_tokens and not as_json:
        print(f"{context.recomputed_tokens:,} tokens were computed again")


@app.command("update")
@takes_server
def update_context(
    name: Name,
    server: ServerOptions,
    display_name: Annotated[
        str | None, typer.Option(help="Free text shown beside the name.", show_default="unchanged")
    ] = None,
    ttl: Annotated[
        float | None,
        typer.Option(
            help="Time from now until the service deletes the context.", show_default="unchanged", metavar="SECONDS"
        ),
    ] = None,
    forever: Annotated[bool, typer.Option("--forever", help="Remove the expiry time.")] = False,
    pin: Annotated[
        bool | None,
        typer.Option(
            "--pin/--unpin",
            help="A pinned context is never expired or evicted.",
            show_default="unchanged",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the display name, the expiry time or the pin of a context.

    Example: longleaf contexts update book --ttl 86400 --display-name "Moby-Dick"
    """
    given = {"display_name": display_name, "ttl": ttl, "is_pinned": pin}
    settings = cast(ContextOptions, {key: value for key, value in given.items() if value is not None})
    if forever and ttl is not None:
        raise InvalidArgument("--ttl", "cannot be given together with --forever")
    if forever:
        settings["expires"] = None
    if not settings:
        raise InvalidArgument("update", "give --display-name, --ttl, --forever, --pin or --unpin")
    with connect(server) as client:
        context = client.update_context(name, **settings)
    _show(context, as_json)


def _show(context: Context, as_json: bool) -> None:
    if as_json:
        print_json(context)
    else:
        print(summary(context))
        print(lifetime(context))


def lifetime(context: Context) -> str:
    """The creation time, the last change and the expiry time."""
    end = "never expires" if context.expires is None else f"expires {_date(context.expires)}"
    pin = ", pinned" if context.is_pinned else ""
    return f"created {_date(context.created)}, updated {_date(context.updated)}, {end}{pin}"


def describe_use(context: Context) -> str:
    """The state of a context, its size in storage, its last use, and the number of its requests."""
    where = {
        "resident": "in memory",
        "evicted": "evicted: reloaded on the next request",
        "restoring": "being reloaded",
        "unspecified": "in a state that this version does not support",
    }
    retained = f", {human_bytes(context.storage_bytes)} in storage" if context.storage_bytes else ""
    return (
        f"{where[context.state]}{retained}; last used {_date(context.used)}, asked {human_count(context.hits, 'time')}"
    )


def positions(info: PositionInfo) -> str:
    """The capacity of a context, and its rotary positions."""
    scaling = f" scaled for {info.scaled_for:,}" if info.scaled_for else ""
    rope = f"{info.rope} rotary positions{scaling}" if info.rope else "no rotary positions"
    precision = "another numeric type" if info.precision == "unspecified" else info.precision
    error = f", phases in {precision}, off by at most {human_angle(info.phase_error)}" if info.rope else ""
    beyond = "; longer than the model was trained for" if info.is_beyond_trained else ""
    return f"up to {info.capacity:,} tokens, {rope}{error}{beyond}"


@app.command("delete")
@takes_server
def delete_context(name: Name, server: ServerOptions, as_json: AsJson = False) -> None:
    """Delete a context. Running answers finish first.

    Example: longleaf contexts delete book
    """
    with connect(server) as client:
        client.delete_context(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print(f"deleted {name}")


app.command("export")(transfer.export_context)
app.command("import")(transfer.import_context)


def shares_table(context: Context) -> Table:
    """A row per rank with its part of a context."""
    table = Table("rank", "tokens", "keys and values")
    for share in context.shares:
        table.add_row(str(share.rank), f"{share.tokens:,}", human_bytes(share.kv_bytes))
    return table


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")

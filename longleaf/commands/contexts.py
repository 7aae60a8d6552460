"""`longleaf contexts`."""

from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longleaf.commands.ingest import summary
from longleaf.commands.options import AsJson, Server, connect, human_bytes, print_json
from longleaf.messages import Context

app = typer.Typer(no_args_is_help=True, help="List, show, fork and delete contexts.")
Name = Annotated[str, typer.Argument(help="Name of the context.")]


@app.command("list")
def list_contexts(server: Server, as_json: AsJson = False) -> None:
    """List all contexts.

    Example: longleaf contexts list
    """
    with connect(server) as client:
        contexts = client.list_contexts()
    if as_json:
        print_json({"contexts": contexts})
        return
    if not contexts:
        print("no contexts; `longleaf ingest FILE --name NAME` makes one")
        return
    table = Table("name", "tokens", "keys and values", "created", "updated")
    for context in contexts:
        times = (_date(context.created), _date(context.updated))
        table.add_row(context.id, f"{context.tokens:,}", human_bytes(context.kv_bytes), *times)
    Console().print(table)


@app.command("show")
def show_context(name: Name, server: Server, as_json: AsJson = False) -> None:
    """Show one context, and where its tokens lie.

    Example: longleaf contexts show book
    """
    with connect(server) as client:
        context = client.get_context(name)
    if as_json:
        print_json(context)
        return
    print(summary(context))
    print(f"created {_date(context.created)}, updated {_date(context.updated)}")
    Console().print(shares_table(context))


@app.command("fork")
def fork_context(
    name: Name,
    new_name: Annotated[str, typer.Argument(help="Name of the new context.")],
    server: Server,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens that the new context begins with.", show_default="all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a new context of another one, or of its beginning. Nothing is copied: both share what they have in common.

    Example: longleaf contexts fork book draft --tokens 5000
    """
    with connect(server) as client:
        context = client.fork_context(name, new_name, num_tokens=tokens)
    if as_json:
        print_json(context)
    else:
        print(summary(context))


@app.command("delete")
def delete_context(name: Name, server: Server, as_json: AsJson = False) -> None:
    """Delete a context; answers that are being generated from it finish first.

    Example: longleaf contexts delete book
    """
    with connect(server) as client:
        client.delete_context(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print(f"{name} is deleted")


def shares_table(context: Context) -> Table:
    """Where the keys and values of a context lie."""
    table = Table("rank", "tokens", "keys and values")
    for share in context.shares:
        table.add_row(str(share.rank), f"{share.tokens:,}", human_bytes(share.kv_bytes))
    return table


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")

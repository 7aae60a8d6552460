"""`longleaf contexts recompute`."""

from typing import Annotated

import typer

from longleaf.cli.flags import takes_server
from longleaf.cli.ingest import summary
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.errors import InvalidArgument


@takes_server
def recompute(
    server: ServerOptions,
    name: Annotated[str | None, typer.Argument(help="Name of the context.", show_default=False)] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All contexts of previous checkpoints whose names are not in use.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute contexts of a previous checkpoint for the current one.

    If the weights, the settings or the type of a checkpoint change, contexts computed before do not appear in the
    service. This command creates them again from their token ids. They are parked, and computed on the next request.
    It is refused if the tokenizer changed, because the ids would mean another text: ingest the text again. The data of
    the previous checkpoint stays.

    Example: longleaf contexts reread book
    """
    if (name is None) != everything:
        raise InvalidArgument("reread", "give the name of a context, or --all")
    if name is None:
        _recompute_all(server, as_json)
        return
    with connect(server) as client:
        context = client.recompute_context(name)
    if as_json:
        print_json(context)
    else:
        print(summary(context))


def _recompute_all(server: ServerOptions, as_json: bool) -> None:
    with connect(server) as client:
        found = client.recompute_contexts()
    if as_json:
        print_json(found)
        return
    for context in found.contexts:
        print(summary(context))
    for left in found.left_out:
        print(f"skipped: {left.reason}")
    if not found.contexts and not found.left_out:
        print("there are no contexts of previous checkpoints")

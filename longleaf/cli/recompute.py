"""`longleaf contexts reread`."""

from typing import Annotated

import typer

from longleaf.cli.flags import takes_server
from longleaf.cli.ingest import summary
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.errors import InvalidArgument


@takes_server
def reread(
    server: ServerOptions,
    name: Annotated[str | None, typer.Argument(help="Name of the context.", show_default=False)] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All contexts that another checkpoint has read, and whose names are free.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have a context read by this checkpoint, which another one has read that lay in the same folder before.

    Where weights, settings or numeric type of a checkpoint change, its contexts are not taken for those of the new one.
    This makes them anew of their token ids; each is parked, and read when it is first asked. It is refused where the
    tokenizer changed, for the same ids would be another text: then ingest the text anew. What was kept before stays.

    Example: longleaf contexts reread book
    """
    if (name is None) != everything:
        raise InvalidArgument("reread", "give the name of a context, or --all")
    if name is None:
        _reread_all(server, as_json)
        return
    with connect(server) as client:
        context = client.reread_context(name)
    if as_json:
        print_json(context)
    else:
        print(summary(context))


def _reread_all(server: ServerOptions, as_json: bool) -> None:
    with connect(server) as client:
        found = client.reread_contexts()
    if as_json:
        print_json(found)
        return
    for context in found.contexts:
        print(summary(context))
    for left in found.left_out:
        print(f"left out: {left.reason}")
    if not found.contexts and not found.left_out:
        print("no context was read by another checkpoint")

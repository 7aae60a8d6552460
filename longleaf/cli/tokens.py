"""`longleaf tokenize` and `longleaf detokenize`."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from longleaf.cli.console import output_console
from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json, read_input


@takes_server
def tokenize(
    text: Annotated[str, typer.Argument(help="The text; - reads standard input.")],
    server: ServerOptions,
    special: Annotated[bool, typer.Option("--special", help="Add the special tokens that begin a prompt.")] = False,
    spans: Annotated[bool, typer.Option("--spans", help="Show the characters of each token.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the token ids of a text.

    Special tokens in the text are encoded as plain text.

    Example: longleaf tokenize "Call me Ishmael." --spans
    """
    given = read_input(text, "text")
    with connect(server) as client:
        found = client.tokenize(given, add_special_tokens=special, with_spans=spans)
    if as_json:
        print_json(found)
    elif found.spans is None:
        print(*found.token_ids)
    else:
        table = Table("token", "from", "to", "text")
        for token_id, (start, end) in zip(found.token_ids, found.spans, strict=True):
            table.add_row(str(token_id), str(start), str(end), Text(repr(given[start:end])))
        output_console().print(table)


@takes_server
def detokenize(
    token_ids: Annotated[list[int], typer.Argument(help="Token ids.", metavar="ID...")],
    server: ServerOptions,
    special: Annotated[
        bool, typer.Option("--special", help="Keep special tokens, which are omitted by default.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the text of token ids.

    Example: longleaf detokenize 72 105
    """
    with connect(server) as client:
        text = client.detokenize(token_ids, keep_special_tokens=special)
    if as_json:
        print_json({"text": text})
    else:
        print(text)

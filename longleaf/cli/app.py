"""The `longleaf` command: its subcommands, and the format and exit codes of errors."""

import sys
from typing import Annotated

import typer

from longleaf import __version__
from longleaf.cli import contexts, credentials, demo, gateway, generate, ingest, models, serve, tokens
from longleaf.cli.chat import chat
from longleaf.cli.cluster import cluster
from longleaf.cli.drain import drain
from longleaf.cli.error_output import describe, exit_code
from longleaf.cli.help import CommandGroup
from longleaf.cli.reset_slots import reset_slots
from longleaf.cli.verify import verify
from longleaf.errors import LongleafError

app = CommandGroup(
    name="longleaf",
    pretty_exceptions_enable=False,
    help="""Serve a language model over documents that are too long for one GPU.

    Try `longleaf demo`, or start `longleaf serve` and run in another terminal:

      longleaf ingest book.txt --name book
      longleaf ask book "Who is the captain?"
      longleaf chat book
    """,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"longleaf {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the name of the command."""


app.command()(demo.demo)
app.command()(serve.serve)
app.command()(gateway.gateway)
app.command()(ingest.ingest)
app.command()(generate.ask)
app.command()(chat)
app.command()(generate.generate)
app.command()(tokens.tokenize)
app.command()(tokens.detokenize)
app.add_typer(contexts.app, name="contexts")
app.add_typer(models.app, name="models")
app.add_typer(credentials.app, name="credentials")
app.command()(cluster)
app.command()(drain)
app.command()(reset_slots)
app.command()(verify)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. An error is printed as one line on stderr and sets the exit code."""
    try:
        app(arguments)
    except LongleafError as error:
        print(f"error: {describe(error)}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): print no message, and flush nothing at exit.
        sys.stdout = sys.stderr
        raise SystemExit(1) from None

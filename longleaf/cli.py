"""The `longleaf` command."""

import sys

import typer

from longleaf.commands import contexts, demo, generate, ingest, serve
from longleaf.commands.cluster import cluster
from longleaf.errors import LongleafError, ResourceExhausted, Unavailable

app = typer.Typer(
    name="longleaf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact generation over contexts that no single GPU can hold.\n\n"
    "Try `longleaf demo`, or `longleaf serve` in one terminal and in another:\n\n"
    "`longleaf ingest book.txt --name book && longleaf ask book 'Who did it?'`",
)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(ingest.ingest)
app.command()(generate.ask)
app.command()(generate.generate)
app.add_typer(contexts.app, name="contexts")
app.command()(cluster)


def exit_code(error: LongleafError) -> int:
    """1 when trying again later may help, 2 when the input must change."""
    return 1 if isinstance(error, Unavailable | ResourceExhausted) or type(error) is LongleafError else 2


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; errors are one line on stderr and an exit code."""
    try:
        app(arguments)
    except LongleafError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output left (`| head`): nothing to say, and nothing to flush at exit.
        sys.stdout = sys.stderr
        raise SystemExit(1) from None

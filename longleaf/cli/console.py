"""The console for tables and texts on standard output."""

import os

from rich.console import Console

PIPE_COLUMNS = 10_000


def output_console() -> Console:
    """A console as wide as the terminal. Pipes and files have no width, so nothing is cut or wrapped there, unless the
    variable COLUMNS is set.
    """
    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=PIPE_COLUMNS)

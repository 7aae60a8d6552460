"""Options that several commands share, and the ways to print."""

import sys
from typing import Annotated

import msgspec
import typer

from longleaf.client import Client, Retry
from longleaf.config import default_server
from longleaf.errors import InvalidArgument

Server = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        default_factory=default_server,
        help="The service to talk to.",
        show_default="LONGLEAF_SERVER, else localhost:50051",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]


IMPATIENT = 3
"""Retries of commands that somebody waits for."""


def connect(server: str, retries: int = IMPATIENT) -> Client:
    """A client that says on stderr when it tries again."""
    return Client(server, retries=retries, on_retry=_say_retry)


def _say_retry(retry: Retry) -> None:
    print(f"trying again in {retry.delay:.1f} s: {retry.error}", file=sys.stderr, flush=True)


def read_input(given: str, field: str) -> str:
    """What was typed, or standard input for `-`. Raises InvalidArgument when that is not UTF-8."""
    if given != "-":
        return given
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"standard input is not UTF-8 at byte {error.start}") from None


def print_json(value: object) -> None:
    """One object on one line, at once."""
    print(msgspec.json.encode(value).decode(), flush=True)


def human_bytes(size: float) -> str:
    """A size for people: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

"""Options that several commands share, and the ways to print."""

from typing import Annotated

import msgspec
import typer

from longleaf.config import default_server

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

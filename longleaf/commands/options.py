"""Options that several commands share, and the ways to print."""

import sys
from typing import Annotated, Any

import msgspec
import typer

from longleaf.client import Client, Retry
from longleaf.config import default_server
from longleaf.errors import InvalidArgument
from longleaf.messages import ModelInfo
from longleaf.model_report import AttentionReport
from longleaf.units import human_seconds

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
KV_DTYPE_TOLD = "Type of kept keys and values; int8 takes a quarter of float32, and answers are not exact."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]


def option(panel: str, told: str, *names: str, default: bool | str = True) -> Any:
    """An option under a heading of the help page."""
    return typer.Option(*names, help=told, rich_help_panel=panel, show_default=default)


IMPATIENT = 3
"""Retries of commands that somebody waits for."""


def connect(server: str, retries: int = IMPATIENT) -> Client:
    """A client that says on stderr when it tries again."""
    return Client(server, retries=retries, on_retry=_say_retry)


def _say_retry(retry: Retry) -> None:
    print(f"trying again in {human_seconds(retry.delay)}: {retry.error}", file=sys.stderr, flush=True)


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


def dtypes_told(model: ModelInfo | AttentionReport) -> str:
    """The numeric type of the weights, and that of keys and values where it is another."""
    return model.dtype if model.kv_dtype in ("", model.dtype) else f"{model.dtype}, keys in {model.kv_dtype}"

"""Options that several commands share, and the ways to print."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from longleaf.client import Client, Retry
from longleaf.client.channels import Access
from longleaf.credentials import looks_secret
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_seconds
from longleaf.model_report import AttentionReport
from longleaf.types import Cluster, Finished, ModelInfo

KV_DTYPE_TOLD = "Type of kept keys and values; int8 takes a quarter of float32, and answers are not exact."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]


def option(panel: str, told: str, *names: str, default: bool | str = True) -> Any:
    """An option under a heading of the help page."""
    return typer.Option(*names, help=told, rich_help_panel=panel, show_default=default)


SERVICE = "The service to talk to"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where a service is, and how to come in: options of every command that calls one (`takes_server`)."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="Its address.",
            rich_help_panel=SERVICE,
            show_default="LONGLEAF_SERVER, else localhost:50051",
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        option(SERVICE, "Authorities of its certificate, in PEM; encrypts.", default="LONGLEAF_TLS_CA, else plain"),
    ] = None
    tls_cert: Annotated[
        Path | None, option(SERVICE, "Your own certificate, if it asks for one.", default="LONGLEAF_TLS_CERT")
    ] = None
    tls_key: Annotated[Path | None, option(SERVICE, "Its private key.", default="LONGLEAF_TLS_KEY")] = None
    credential_file: Annotated[
        Path | None,
        option(SERVICE, "File with your credential, if it asks for one.", default="that in LONGLEAF_CREDENTIAL"),
    ] = None

    @property
    def credential(self) -> str | None:
        """What the file says. Raises InvalidArgument."""
        if self.credential_file is None:
            return None
        try:
            text = self.credential_file.read_text("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            message = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            if looks_secret(str(self.credential_file)):
                message = "that looks like a credential itself: put it in a file, and name the file"
                raise InvalidArgument("credential", message) from None
            raise InvalidArgument("credential", f"{self.credential_file}: {message}") from None
        if not text:
            raise InvalidArgument("credential", f"{self.credential_file} is empty")
        if text.startswith("{") or len(text.split()) > 1:
            raise InvalidArgument("credential", f"{self.credential_file} must have the credential alone")
        return text


IMPATIENT = 3
"""Retries of commands that somebody waits for."""


def connect(server: ServerOptions, retries: int = IMPATIENT) -> Client:
    """A client that says on stderr when it tries again."""
    access = Access(
        tls_ca=server.tls_ca, tls_cert=server.tls_cert, tls_key=server.tls_key, credential=server.credential
    )
    return Client(server.server, retries=retries, on_retry=_say_retry, **access)


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


def exactness_told(found: Finished | Cluster) -> str:
    """Whether answers are exact, and if not, why."""
    return "exact" if found.is_exact else f"not exact ({found.exactness_note or 'the service gives no reason'})"

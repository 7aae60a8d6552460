"""Options that several commands share, and output functions."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from longleaf.credentials import looks_secret
from longleaf.errors import InvalidArgument, LongleafError
from longleaf.formatting import human_seconds
from longleaf.types import Cluster, Finished

if TYPE_CHECKING:  # the client takes half of the import time of all commands, and --help does not need it
    from longleaf.client import Client, Retry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def option(panel: str, description: str, *names: str, default: bool | str = True, metavar: str | None = None) -> Any:
    """An option under a heading of the help page. `default` may describe a default that is computed."""
    return typer.Option(*names, help=description, rich_help_panel=panel, show_default=default, metavar=metavar)


SERVICE = "Connection"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, TLS and credential of a service: options of every command that calls one (`takes_server`)."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="Address of the service.",
            rich_help_panel=SERVICE,
            show_default="LONGLEAF_SERVER, else localhost:50051",
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        option(
            SERVICE,
            "Encrypt, and trust the certificate authorities in this PEM file.",
            default="LONGLEAF_TLS_CA, else no TLS",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, option(SERVICE, "Client certificate, if the service requires one.", default="LONGLEAF_TLS_CERT")
    ] = None
    tls_key: Annotated[
        Path | None, option(SERVICE, "Private key of the client certificate.", default="LONGLEAF_TLS_KEY")
    ] = None
    credential_file: Annotated[
        Path | None,
        option(SERVICE, "File that contains your credential.", default="the credential in LONGLEAF_CREDENTIAL"),
    ] = None

    @property
    def credential(self) -> str | None:
        """The content of the credential file. Raises InvalidArgument."""
        if self.credential_file is None:
            return None
        try:
            text = self.credential_file.read_text("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            message = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            if looks_secret(str(self.credential_file)):
                message = "this looks like a credential: put it in a file, and give the name of the file"
                raise InvalidArgument("credential", message) from None
            raise InvalidArgument("credential", f"{self.credential_file}: {message}") from None
        if not text:
            raise InvalidArgument("credential", f"{self.credential_file} is empty")
        if text.startswith("{") or len(text.split()) > 1:
            raise InvalidArgument("credential", f"{self.credential_file} must contain only the credential")
        return text


IMPATIENT = 3
"""Maximum number of retries of interactive commands."""


def connect(server: ServerOptions, retries: int = IMPATIENT) -> "Client":
    """A client that reports retries on stderr, each reason once."""
    from longleaf.client import Client
    from longleaf.client.channels import Access

    access = Access(
        tls_ca=server.tls_ca, tls_cert=server.tls_cert, tls_key=server.tls_key, credential=server.credential
    )
    return Client(server.server, retries=retries, on_retry=RetryReporter().report, **access)


_REFUSED = re.compile(r"the server at (\S+) does not answer \(.*Connection refused.*", re.DOTALL)


def message_of(error: LongleafError) -> str:
    """The error message, with advice if no process listens on the address."""
    refused = _REFUSED.match(str(error))
    if refused is None:
        return str(error)
    return f"nothing listens on {refused[1]}: start `longleaf serve`, or give another --server"


class RetryReporter:
    """Reports retries on stderr. A reason is printed once, until another one follows."""

    def __init__(self) -> None:
        self._last = ""

    def report(self, retry: "Retry") -> None:
        reason = message_of(retry.error)
        if reason != self._last:
            self._last = reason
            print(f"retrying in {human_seconds(retry.delay)}: {reason}", file=sys.stderr, flush=True)


def read_input(given: str, field: str) -> str:
    """The argument, or standard input for `-`. Raises InvalidArgument if the input is not UTF-8."""
    if given != "-":
        return given
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"standard input is not UTF-8 at byte {error.start}") from None


def print_json(value: object) -> None:
    """Prints one JSON object on one line, and flushes."""
    print(msgspec.json.encode(value).decode(), flush=True)


NO_REASON = "the service gives no reason"


def exactness_line(found: Finished | Cluster) -> str:
    """Whether answers are exact, and the reason if they are not. For quantized weights, how they are computed."""
    verdict, reason = ("exact", "") if found.is_exact else ("not exact", found.exactness_note or NO_REASON)
    notes = "; ".join(filter(None, (reason, found.dequantization)))
    return f"{verdict} ({notes})" if notes else verdict

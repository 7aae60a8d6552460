"""`longleaf door`: becomes `python -m door` with the same options."""

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, cast

from longleaf.cli.exec_process import become
from longleaf.cli.flags import takes_flags
from longleaf.cli.options import AsJson, option
from longleaf.service_settings import LogFormat, LogLevel, TelemetryConfig

SERVICE = "The service behind it"
DOOR = "Where it listens"
SECURITY = "Who may come in"
TELEMETRY = "What it tells of itself"
_TELEMETRY = TelemetryConfig()


@dataclass(frozen=True, kw_only=True)
class DoorFlags:
    """What was typed; the names are those of the door's settings."""

    server: Annotated[
        str | None, option(SERVICE, "Its address, HOST:PORT.", default="LONGLEAF_SERVER, else localhost:50051")
    ] = None
    tls_ca: Annotated[
        Path | None,
        option(SERVICE, "Authorities of its certificate, in PEM; encrypts.", default="LONGLEAF_TLS_CA, else plain"),
    ] = None
    server_tls_cert: Annotated[
        Path | None, option(SERVICE, "The door's own certificate, if it asks for one.", default="LONGLEAF_TLS_CERT")
    ] = None
    server_tls_key: Annotated[Path | None, option(SERVICE, "Its private key.", default="LONGLEAF_TLS_KEY")] = None
    host: Annotated[str, option(DOOR, "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option(DOOR, "Port to listen on; 0 lets the system choose.")] = 8000
    allow_host: Annotated[
        list[str] | None,
        option(DOOR, "A name under which it is called; may be given several times.", default="addresses, localhost"),
    ] = None
    public_url: Annotated[
        str | None, option(DOOR, "What callers see of it behind a proxy, such as https://books.example.", default="own")
    ] = None
    max_connections: Annotated[int, option(DOOR, "Connections that may be open; of more each is refused.")] = 1024
    tls_cert: Annotated[
        Path | None,
        option(SECURITY, "Certificate chain of the door, in PEM; read again when it changes.", default="no TLS"),
    ] = None
    tls_key: Annotated[Path | None, option(SECURITY, "Its private key, without a passphrase.", default="none")] = None
    insecure: Annotated[
        bool,
        option(
            SECURITY,
            "Listen beyond this machine without TLS, and let credentials go on to the service in plain text.",
            "--insecure",
        ),
    ] = False
    drain_seconds: Annotated[float, option(DOOR, "How long answers and uploads that run may go on after a signal.")] = (
        3.0
    )
    metrics_port: Annotated[
        int | None,
        option(TELEMETRY, "Port of metrics for Prometheus, which asks nobody who they are; 0: any.", default="none"),
    ] = None
    metrics_host: Annotated[str, option(TELEMETRY, "Address of that port.")] = "127.0.0.1"
    log_format: Annotated[LogFormat, option(TELEMETRY, "Lines for people, or a JSON object per line.")] = (
        _TELEMETRY.log_format
    )
    log_level: Annotated[
        LogLevel, option(TELEMETRY, "What is less important is not logged; info has a line for every call.")
    ] = _TELEMETRY.log_level

    def options(self) -> list[str]:
        """For the door."""
        reported = list[str]()
        for field in fields(self):
            value = getattr(self, field.name)
            several = cast(list[object], value) if isinstance(value, list) else [value]
            reported += [f"--{field.name.replace('_', '-')}={each}" for each in several if each is not None]
        return reported


@takes_flags(DoorFlags)
def door(flags: DoorFlags, as_json: AsJson = False) -> None:
    """Open a door for HTTP in front of a service: OpenAI's dialect, contexts, and a page for readers.

    Prints `listening on http://HOST:PORT`; with --json, {"http": "http://HOST:PORT"}. It holds nothing: it may be
    ended, started again and copied while the service goes on. Callers say who they are to the service, by
    `Authorization: Bearer CREDENTIAL`, and the door passes that on. `longleaf serve --http PORT` opens one beside a
    service.

    Example: longleaf door --server localhost:50051 --port 8000
    """
    command = [sys.executable, "-P", "-m", "door", *flags.options(), f"--as-json={as_json}"]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    become(command)

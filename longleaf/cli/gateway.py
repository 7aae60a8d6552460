"""`longleaf gateway`: replaces itself by `python -m gateway` with the same options."""

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, cast

from longleaf.cli.exec_process import exec_command
from longleaf.cli.flags import takes_flags
from longleaf.cli.options import AsJson, option
from longleaf.service_settings import LogFormat, LogLevel, TelemetryConfig

SERVICE = "Service"
GATEWAY = "Address"
SECURITY = "Security"
TELEMETRY = "Metrics and logs"
_TELEMETRY = TelemetryConfig()


@dataclass(frozen=True, kw_only=True)
class GatewayFlags:
    """The parsed options. The names are those of `gateway.settings`."""

    server: Annotated[
        str | None,
        option(
            SERVICE,
            "Address of the service.",
            default="LONGLEAF_SERVER, else localhost:50051",
            metavar="HOST:PORT",
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
    server_tls_cert: Annotated[
        Path | None, option(SERVICE, "Client certificate, if the service requires one.", default="LONGLEAF_TLS_CERT")
    ] = None
    server_tls_key: Annotated[
        Path | None, option(SERVICE, "Private key of the client certificate.", default="LONGLEAF_TLS_KEY")
    ] = None
    host: Annotated[str, option(GATEWAY, "Address to listen on; 0.0.0.0: all interfaces.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, option(GATEWAY, "HTTP port; 0: any free port.", metavar="PORT")] = 8000
    allow_host: Annotated[
        list[str] | None,
        option(
            GATEWAY,
            "Host name under which clients may reach the gateway; may be repeated. IP addresses are always accepted.",
            default="localhost",
            metavar="NAME",
        ),
    ] = None
    public_url: Annotated[
        str | None,
        option(
            GATEWAY,
            "URL of the gateway behind a proxy, such as https://books.example.",
            default="its own address",
            metavar="URL",
        ),
    ] = None
    max_connections: Annotated[
        int, option(GATEWAY, "Maximum number of open connections; further ones are refused.")
    ] = 1024
    tls_cert: Annotated[
        Path | None,
        option(SECURITY, "Certificate chain of the gateway, in PEM; reloaded when it changes.", default="no TLS"),
    ] = None
    tls_key: Annotated[
        Path | None, option(SECURITY, "Private key of the certificate, without a passphrase.", default="none")
    ] = None
    insecure: Annotated[
        bool,
        option(
            SECURITY,
            "Allow addresses other than loopback without TLS, and send credentials to the service in plain text.",
            "--insecure",
        ),
    ] = False
    drain_seconds: Annotated[
        float, option(GATEWAY, "How long running answers and uploads may continue after a signal.", metavar="SECONDS")
    ] = 3.0
    metrics_port: Annotated[
        int | None,
        option(
            TELEMETRY,
            "Port of Prometheus metrics, without authentication; 0: any free port.",
            default="none",
            metavar="PORT",
        ),
    ] = None
    metrics_host: Annotated[str, option(TELEMETRY, "Address of the metrics port.", metavar="ADDRESS")] = "127.0.0.1"
    log_format: Annotated[LogFormat, option(TELEMETRY, "Log lines as text, or as JSON objects.")] = (
        _TELEMETRY.log_format
    )
    log_level: Annotated[LogLevel, option(TELEMETRY, "Minimum severity to log; info includes every call.")] = (
        _TELEMETRY.log_level
    )

    def options(self) -> list[str]:
        """The command-line options of `python -m gateway`."""
        arguments = list[str]()
        for field in fields(self):
            value = getattr(self, field.name)
            several = cast(list[object], value) if isinstance(value, list) else [value]
            arguments += [f"--{field.name.replace('_', '-')}={each}" for each in several if each is not None]
        return arguments


@takes_flags(GatewayFlags)
def gateway(flags: GatewayFlags, as_json: AsJson = False) -> None:
    """Run an HTTP gateway in front of a service.

    The gateway serves the OpenAI-compatible API, an API for contexts, and a web page. It prints
    `listening on http://HOST:PORT`; with --json, {"http": "http://HOST:PORT"}. It has no state: it may be restarted or
    replicated while the service runs. It forwards the header `Authorization: Bearer CREDENTIAL` to the service, which
    checks the credential. `longleaf serve --http PORT` starts a gateway together with the service.

    Example: longleaf gateway --server localhost:50051 --port 8000
    """
    command = [sys.executable, "-P", "-m", "gateway", *flags.options(), f"--as-json={as_json}"]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    exec_command(command)

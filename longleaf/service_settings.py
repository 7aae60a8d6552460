"""Settings of a service and of a gateway."""

import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import msgspec

from longleaf.config import (
    DEFAULT_PORT,
    LOOPBACK,
    DataConfig,
    EngineConfig,
    LauncherChoice,
    SamplingDefaults,
    check_model_name,
)
from longleaf.errors import InvalidArgument
from longleaf.options import (
    ADDRESS,
    HTTP,
    METRICS,
    PORTS,
    RANKS,
    REQUESTS,
    SECURITY,
    SERVICE,
    TELEMETRY,
    UPSTREAM,
    Limit,
    Option,
    check_limits,
    flag_of,
    own_settings,
    seconds,
)

Part = TypeVar("Part", bound=msgspec.Struct)
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
DEFAULT_HTTP_PORT = 8000
RESPONSES_SECONDS = 24 * 3600.0
MAX_RESPONSES_SECONDS = 365 * 24 * 3600
MAX_DRAIN_SECONDS = 24 * 3600
"""Of a gateway."""


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """TLS and authentication. Files are reloaded when their contents change."""

    tls_cert: Annotated[
        str | None,
        Option(
            SECURITY,
            "Certificate chain of the service, in PEM; reloaded when it changes.",
            default="no TLS",
            is_path=True,
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        Option(SECURITY, "Private key of the certificate, without a passphrase.", default="none", is_path=True),
    ] = None
    tls_client_ca: Annotated[
        str | None,
        Option(
            SECURITY,
            "Certificate authorities of clients, in PEM; every client must present a certificate.",
            default="no client certificates",
            is_path=True,
        ),
    ] = None
    credentials: Annotated[
        str | None,
        Option(
            SECURITY,
            "File of accepted credentials with their tenants and roles: the lines that `longleaf credentials new` "
            "prints; reloaded when it changes.",
            default="every caller is admin",
            is_path=True,
        ),
    ] = None
    health_port: Annotated[
        int | None, Option(SECURITY, "With TLS: port for health checks in plain text.", default="none", limit=PORTS)
    ] = None
    insecure: Annotated[
        bool,
        Option(
            SECURITY,
            "Allow addresses other than loopback without TLS or without credentials, for services behind a proxy or "
            "in a private network.",
        ),
    ] = False

    def check(self, host: str) -> None:
        """Raises InvalidArgument naming the first invalid setting of a service at `host`."""
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"requires {other}")
        for name in ("tls_client_ca", "health_port"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise InvalidArgument(name, "requires tls_cert")
        check_limits(self)
        if self.insecure or is_loopback(host):
            return
        missing = [name for name in ("tls_cert", "credentials") if getattr(self, name) is None]
        if self.tls_client_ca is not None and "credentials" in missing:
            missing.remove("credentials")
        if missing:
            message = " and ".join(map(flag_of, missing))
            rule = f"{host} can be reached from other machines: give {message}, or --insecure"
            raise InvalidArgument("host", rule)


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP gateway that runs with the service."""

    http: Annotated[
        int | None,
        Option(
            HTTP,
            "Port of the HTTP gateway: OpenAI-compatible API and web page; 0: any free port.",
            default="off",
            limit=PORTS,
        ),
    ] = None
    allow_host: Annotated[
        str | None,
        Option(
            HTTP,
            "Host names under which clients may reach the gateway, separated by commas. IP addresses are always "
            "accepted.",
            default="localhost",
            metavar="NAMES",
        ),
    ] = None
    allow_origin: Annotated[
        str | None,
        Option(
            HTTP,
            "Origins of web pages that may call the gateway from a browser, such as https://chat.example, separated by "
            "commas.",
            default="only its own page",
            metavar="ORIGINS",
        ),
    ] = None
    public_url: Annotated[
        str | None,
        Option(
            HTTP,
            "URL of the gateway behind a proxy, such as https://books.example.",
            default="its own address",
            metavar="URL",
        ),
    ] = None
    responses_ttl: Annotated[
        float,
        Option(
            HTTP,
            "How long the gateway stores the responses of /v1/responses; with --data-dir, they survive restarts.",
            limit=seconds(1, MAX_RESPONSES_SECONDS),
        ),
    ] = RESPONSES_SECONDS

    @property
    def allowed(self) -> tuple[str, ...]:
        """The accepted host names."""
        return _split(self.allow_host)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The accepted origins."""
        return _split(self.allow_origin)

    def check(self, security: SecurityConfig) -> None:
        """Raises InvalidArgument naming the first invalid setting."""
        check_limits(self)
        for name in ("allow_host", "allow_origin", "public_url"):
            if getattr(self, name) is not None and self.http is None:
                raise InvalidArgument(name, "requires http")
        check_origins(self.allowed_origins)
        if self.public_url is not None:
            check_public_url(self.public_url)
        if self.http is not None and security.tls_client_ca is not None and security.credentials is None:
            message = "does not authenticate clients by certificate: with tls_client_ca it requires credentials"
            raise InvalidArgument("http", message)


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics, logs and traces of a service."""

    metrics_port: Annotated[
        int | None, Option(TELEMETRY, "Port of Prometheus metrics; 0: any free port.", default="none", limit=PORTS)
    ] = None
    metrics_host: Annotated[str, Option(TELEMETRY, "Address of the metrics port.", metavar="ADDRESS")] = LOOPBACK
    log_format: Annotated[LogFormat, Option(TELEMETRY, "Log lines as text, or as JSON objects.")] = "text"
    log_level: Annotated[
        LogLevel,
        Option(TELEMETRY, "Minimum severity to log; info includes every call and the choice of kernels and merges."),
    ] = "warning"
    traces: Annotated[
        bool, Option(TELEMETRY, "Send traces over OTLP, configured by the variables OTEL_*; needs 'longleaf[otel]'.")
    ] = False

    @property
    def has_plain_log(self) -> bool:
        """Whether only warnings are logged, as text."""
        return self.log_format == "text" and self.log_level == "warning"

    def check(self) -> None:
        """Raises InvalidArgument naming the first invalid setting."""
        check_limits(self)
        if self.metrics_port is None and self.metrics_host != LOOPBACK:
            raise InvalidArgument("metrics_host", "requires metrics_port")


UNLIMITED_DRAIN_SECONDS = 1e6
"""Limit of a drain that waits for all running calls."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a service."""

    data: DataConfig = DataConfig()
    security: SecurityConfig = SecurityConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    gateway: HttpConfig = HttpConfig()
    engine: EngineConfig
    model_name: Annotated[
        str | None,
        Option(
            SERVICE, "Name of the model for clients.", default="the name of the folder", metavar="NAME", after="model"
        ),
    ] = None
    sampling_defaults: Annotated[
        SamplingDefaults,
        Option(
            SERVICE,
            "Sampling parameters for requests that omit them: greedy decoding, or those in the model's "
            "generation_config.json.",
        ),
    ] = "greedy"
    host: Annotated[str, Option(SERVICE, "Address to listen on; 0.0.0.0: all interfaces.", metavar="ADDRESS")] = (
        LOOPBACK
    )
    port: Annotated[int, Option(SERVICE, "gRPC port; 0: any free port.", limit=PORTS)] = DEFAULT_PORT
    launcher: Annotated[
        LauncherChoice,
        Option(
            RANKS,
            "How ranks are started; local: as plain processes of this machine, which is fastest; ray: on the machines "
            "of a Ray cluster; auto: local, or ray with --ray-address or --wait-for-ranks.",
            after="world_size",
        ),
    ] = "auto"
    ray_address: Annotated[
        str | None,
        Option(RANKS, "Ray cluster to join, such as auto.", default="a new one on this machine", metavar="ADDRESS"),
    ] = None
    wait_for_ranks: Annotated[
        float,
        Option(
            RANKS,
            "How long to wait until the Ray cluster has a CPU (and GPU) for every rank; 0: fail immediately.",
            limit=seconds(0),
        ),
    ] = 0.0
    drain_seconds: Annotated[
        float | None,
        Option(
            REQUESTS,
            "How long running calls may continue after a shutdown request.",
            limit=seconds(0),
            default="2 after a signal, no limit after `longleaf drain`",
            after="start_timeout",
        ),
    ] = None
    as_json: bool = False
    """Print the address, and the components still missing, as JSON objects instead of text."""

    @property
    def signal_drain_seconds(self) -> float:
        """How long running calls may continue after a signal."""
        return 2.0 if self.drain_seconds is None else self.drain_seconds

    @property
    def call_drain_seconds(self) -> float:
        """How long running calls may continue after `longleaf drain`."""
        return UNLIMITED_DRAIN_SECONDS if self.drain_seconds is None else self.drain_seconds

    @property
    def shown_name(self) -> str:
        """Name of the model as clients see it."""
        folder = Path(self.engine.model).resolve().name
        return self.model_name or os.fsencode(folder).decode(errors="replace")  # it may be any bytes

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that is invalid."""
        self.check_all_but_model()
        folder = Path(self.engine.model)
        if not folder.is_dir():
            raise InvalidArgument("model", f"{self.engine.model} is not a folder")
        if not (folder / "config.json").is_file():
            raise InvalidArgument("model", f"{self.engine.model} has no config.json")

    def check_all_but_model(self) -> None:
        """Raises InvalidArgument naming the first setting that is invalid, except the model."""
        self.engine.check()
        check_limits(self)
        if self.model_name is not None:
            check_model_name(self.model_name)
        if self.ray_address is not None and self.launcher == "local":
            raise InvalidArgument("ray_address", "requires the launcher ray, not local")
        self.data.check(self.engine.snapshot_url)
        self.security.check(self.host)
        self.telemetry.check()
        self.gateway.check(self.security)
        if self.engine.share_prefixes and self.security.credentials is None:
            raise InvalidArgument("share_prefixes", "requires credentials: without them there are no tenants")

    def with_absolute_paths(self) -> Self:
        """The same settings for a process in any folder."""
        engine = msgspec.structs.replace(self.engine, model=os.path.abspath(self.engine.model))
        url = engine.snapshot_url
        if url is not None and "://" not in url:
            engine = msgspec.structs.replace(engine, snapshot_url=os.path.abspath(url))
        parts = {"data": _with_absolute_paths(self.data), "security": _with_absolute_paths(self.security)}
        return msgspec.structs.replace(self, engine=engine, **parts)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and access rules of a gateway, and the address of its service."""

    server: Annotated[
        str | None,
        Option(
            UPSTREAM, "Address of the service.", default="LONGLEAF_SERVER, else localhost:50051", metavar="HOST:PORT"
        ),
    ] = None
    tls_ca: Annotated[
        str | None,
        Option(
            UPSTREAM,
            "Encrypt, and trust the certificate authorities in this PEM file.",
            default="LONGLEAF_TLS_CA, else no TLS",
            is_path=True,
        ),
    ] = None
    """An empty string overrides the environment: no TLS."""
    server_tls_cert: Annotated[
        str | None,
        Option(UPSTREAM, "Client certificate, if the service requires one.", default="LONGLEAF_TLS_CERT", is_path=True),
    ] = None
    server_tls_key: Annotated[
        str | None, Option(UPSTREAM, "Private key of the client certificate.", default="LONGLEAF_TLS_KEY", is_path=True)
    ] = None
    host: Annotated[str, Option(ADDRESS, "Address to listen on; 0.0.0.0: all interfaces.", metavar="ADDRESS")] = (
        LOOPBACK
    )
    port: Annotated[int, Option(ADDRESS, "HTTP port; 0: any free port.", limit=PORTS)] = DEFAULT_HTTP_PORT
    allow_host: Annotated[
        tuple[str, ...],
        Option(
            ADDRESS,
            "Host name under which clients may reach the gateway; may be repeated. IP addresses are always accepted.",
            default="localhost",
            metavar="NAME",
        ),
    ] = ()
    allow_origin: Annotated[
        tuple[str, ...],
        Option(
            ADDRESS,
            "Origin of web pages that may call the gateway from a browser, such as https://chat.example; may be "
            "repeated.",
            default="only its own page",
            metavar="ORIGIN",
        ),
    ] = ()
    public_url: Annotated[
        str | None,
        Option(
            ADDRESS,
            "URL of the gateway behind a proxy, such as https://books.example.",
            default="its own address",
            metavar="URL",
        ),
    ] = None
    responses_ttl: Annotated[
        float,
        Option(
            ADDRESS,
            "How long the gateway stores the responses of /v1/responses, in memory.",
            limit=seconds(1, MAX_RESPONSES_SECONDS),
        ),
    ] = RESPONSES_SECONDS
    max_connections: Annotated[
        int,
        Option(
            ADDRESS, "Maximum number of open connections; further ones are refused.", limit=Limit(1, rule="positive")
        ),
    ] = 1024
    drain_seconds: Annotated[
        float,
        Option(
            ADDRESS,
            "How long running answers and uploads may continue after a signal.",
            limit=seconds(0, MAX_DRAIN_SECONDS),
        ),
    ] = 3.0
    tls_cert: Annotated[
        str | None,
        Option(
            SECURITY,
            "Certificate chain of the gateway, in PEM; reloaded when it changes.",
            default="no TLS",
            is_path=True,
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        Option(SECURITY, "Private key of the certificate, without a passphrase.", default="none", is_path=True),
    ] = None
    insecure: Annotated[
        bool,
        Option(
            SECURITY,
            "Allow addresses other than loopback without TLS, and send credentials to the service in plain text.",
        ),
    ] = False
    metrics_port: Annotated[
        int | None,
        Option(
            METRICS,
            "Port of Prometheus metrics, without authentication; 0: any free port.",
            default="none",
            limit=PORTS,
        ),
    ] = None
    metrics_host: Annotated[str, Option(METRICS, "Address of the metrics port.", metavar="ADDRESS")] = LOOPBACK
    log_format: Annotated[LogFormat, Option(METRICS, "Log lines as text, or as JSON objects.")] = "text"
    log_level: Annotated[LogLevel, Option(METRICS, "Minimum severity to log; info includes every call.")] = "warning"
    responses_dir: str | None = None
    """Folder for the responses of /v1/responses; None: in memory only."""
    as_json: bool = False
    """Print the address as a JSON object instead of a text line."""
    with_parent: bool = False
    """Stop at the end of standard input, which means that the parent process has exited."""

    def check(self) -> None:
        """Raises InvalidArgument naming the first invalid setting."""
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"requires {other}")
        check_limits(self)
        check_origins(self.allow_origin)
        if self.public_url is not None:
            check_public_url(self.public_url)
        if not (is_loopback(self.host) or self.insecure or self.tls_cert is not None):
            rule = f"{self.host} can be reached from other machines: give --tls-cert or --insecure"
            raise InvalidArgument("host", rule)


def check_public_url(url: str) -> None:
    """Raises InvalidArgument for anything but a scheme and a host."""
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not host or "/" in host:
        raise InvalidArgument("public_url", f"{url} is not https://HOST without a path")


_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:]+\]|[a-z0-9._-]+)(?P<port>:[0-9]{1,5})?")
USUAL_PORTS = {"http": ":80", "https": ":443"}


def check_origins(origins: Iterable[str]) -> None:
    """Raises InvalidArgument for anything but a scheme, a host and a port, as browsers send them."""
    for origin in origins:
        found = _ORIGIN.fullmatch(origin)
        if found is None:
            message = f"{origin} is not SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path or wildcards"
            raise InvalidArgument("allow_origin", message)
        if found["port"] is not None and USUAL_PORTS.get(found["scheme"]) == found["port"]:
            raise InvalidArgument("allow_origin", f"{origin}: browsers omit the port {found['port'][1:]}")


def _split(names: str | None) -> tuple[str, ...]:
    return tuple(name for name in (names or "").split(",") if name)


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_absolute_paths(config: Part) -> Part:
    names = [setting.name for setting in own_settings(type(config)) if setting.option.is_path]
    found = {name: getattr(config, name) for name in names}
    return msgspec.structs.replace(config, **{name: os.path.abspath(path) for name, path in found.items() if path})

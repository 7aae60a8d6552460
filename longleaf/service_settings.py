"""Settings of whom a service lets in, and of what it tells of itself."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from longleaf.config import LOOPBACK
from longleaf.errors import InvalidArgument

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_PORT = 65535


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may come in, and over what connections. Files are read again when their content changes."""

    tls_cert: str | None = None
    """File of the certificate chain, in PEM; None: connections are plain."""
    tls_key: str | None = None
    """File of its private key."""
    tls_client_ca: str | None = None
    """File of the authorities whose certificates clients must have; None: they need none."""
    credentials: str | None = None
    """File of who may come in, and what they may; None: everybody, and everything."""
    health_port: int | None = None
    """With TLS: a port for health checks alone, in plain text; None: there is none."""
    insecure: bool = False
    """Listen beyond this machine without TLS or without credentials."""

    def check(self, host: str) -> None:
        """Raises InvalidArgument naming the first setting that makes no sense for a service at `host`."""
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"needs {other}: a certificate is nothing without its key")
        for name in ("tls_client_ca", "health_port"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise InvalidArgument(name, "needs tls_cert: connections are plain without it")
        _check_port("health_port", self.health_port)
        if self.insecure or is_loopback(host):
            return
        missing = [name for name in ("tls_cert", "credentials") if getattr(self, name) is None]
        if self.tls_client_ca is not None and "credentials" in missing:
            missing.remove("credentials")
        if missing:
            message = " and ".join(map(flag_of, missing))
            rule = f"{host} can be reached from other machines: give {message}, or say --insecure"
            raise InvalidArgument("host", rule)


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The door for HTTP beside a service."""

    http: int | None = None
    """Its port; 0 lets the system choose; None: there is no door."""
    allow_host: str | None = None
    """Names under which callers may reach it beside addresses and localhost, with commas between them."""
    public_url: str | None = None
    """What callers see of it where a proxy stands in front."""

    @property
    def allowed(self) -> list[str]:
        """The names."""
        return [name for name in (self.allow_host or "").split(",") if name]

    def check(self, security: SecurityConfig) -> None:
        """Raises InvalidArgument naming the first setting that makes no sense."""
        _check_port("http", self.http)
        for name in ("allow_host", "public_url"):
            if getattr(self, name) is not None and self.http is None:
                raise InvalidArgument(name, "needs http: there is no door without it")
        if self.public_url is not None:
            check_public_url(self.public_url)
        if self.http is not None and security.tls_client_ca is not None and security.credentials is None:
            message = "asks nobody for a certificate: with tls_client_ca it needs credentials"
            raise InvalidArgument("http", message)


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a service tells of itself, and where."""

    metrics_port: int | None = None
    """Port of metrics for Prometheus; 0 lets the system choose; None: there is none."""
    metrics_host: str = LOOPBACK
    """Address of that port."""
    log_format: LogFormat = "text"
    """Lines for people, or one JSON object per line."""
    log_level: LogLevel = "warning"
    """What is less important is not logged."""
    traces: bool = False
    """Send traces over OTLP, as the variables OTEL_* say; needs the extra `otel`."""

    @property
    def has_plain_log(self) -> bool:
        """Whether only what goes wrong is logged, for people."""
        return self.log_format == "text" and self.log_level == "warning"

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that makes no sense."""
        _check_port("metrics_port", self.metrics_port)
        if self.metrics_port is None and self.metrics_host != LOOPBACK:
            raise InvalidArgument("metrics_host", "needs metrics_port: without it there are no metrics")


def flag_of(name: str) -> str:
    """What a setting is called on the command line."""
    return f"--{name.replace('_', '-')}"


def in_flags(text: str, names: Iterable[str]) -> str:
    """`text` with settings of these names, as far as they are no plain words, as the command line calls them."""
    known = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{known})(?![\w/-]|\.\w)", lambda found: flag_of(found[0]), text)


def check_public_url(url: str) -> None:
    """Raises InvalidArgument for what is no scheme and host."""
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not host or "/" in host:
        raise InvalidArgument("public_url", f"{url} is not https://HOST, with nothing behind the host")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= MAX_PORT:
        raise InvalidArgument(name, f"{port} is not between 0 and {MAX_PORT}")

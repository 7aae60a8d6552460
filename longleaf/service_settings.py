"""Security, HTTP gateway and telemetry settings of a service."""

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
    """TLS and authentication. Files are reloaded when their contents change."""

    tls_cert: str | None = None
    """PEM file with the certificate chain; None: plain text connections."""
    tls_key: str | None = None
    """File with its private key."""
    tls_client_ca: str | None = None
    """File with the certificate authorities of client certificates, which are then required; None: not required."""
    credentials: str | None = None
    """File with the tenants, their credentials and quotas; None: no authentication, no limits."""
    health_port: int | None = None
    """With TLS: an additional plain text port for health checks only; None: no such port."""
    insecure: bool = False
    """Permits listening on other than loopback addresses without TLS or credentials."""

    def check(self, host: str) -> None:
        """Raises InvalidArgument naming the first invalid setting of a service at `host`."""
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"requires {other}")
        for name in ("tls_client_ca", "health_port"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise InvalidArgument(name, "requires tls_cert")
        _check_port("health_port", self.health_port)
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

    http: int | None = None
    """Port; 0 lets the system choose; None: no gateway."""
    allow_host: str | None = None
    """Accepted host names besides addresses and localhost, separated by commas."""
    public_url: str | None = None
    """External URL if there is a reverse proxy."""

    @property
    def allowed(self) -> list[str]:
        """The accepted host names."""
        return [name for name in (self.allow_host or "").split(",") if name]

    def check(self, security: SecurityConfig) -> None:
        """Raises InvalidArgument naming the first invalid setting."""
        _check_port("http", self.http)
        for name in ("allow_host", "public_url"):
            if getattr(self, name) is not None and self.http is None:
                raise InvalidArgument(name, "requires http")
        if self.public_url is not None:
            check_public_url(self.public_url)
        if self.http is not None and security.tls_client_ca is not None and security.credentials is None:
            message = "does not authenticate clients by certificate: with tls_client_ca it requires credentials"
            raise InvalidArgument("http", message)


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics, logs and traces of a service."""

    metrics_port: int | None = None
    """Port of metrics for Prometheus; 0 lets the system choose; None: no metrics."""
    metrics_host: str = LOOPBACK
    """Address of that port."""
    log_format: LogFormat = "text"
    """Text lines, or one JSON object per line."""
    log_level: LogLevel = "warning"
    """Minimum severity to log."""
    traces: bool = False
    """Export traces over OTLP, configured by the variables OTEL_*; requires the extra `otel`."""

    @property
    def has_plain_log(self) -> bool:
        """Whether only warnings are logged, as text."""
        return self.log_format == "text" and self.log_level == "warning"

    def check(self) -> None:
        """Raises InvalidArgument naming the first invalid setting."""
        _check_port("metrics_port", self.metrics_port)
        if self.metrics_port is None and self.metrics_host != LOOPBACK:
            raise InvalidArgument("metrics_host", "requires metrics_port")


def flag_of(name: str) -> str:
    """Command-line flag of a setting."""
    return f"--{name.replace('_', '-')}"


def with_flag_names(text: str, names: Iterable[str]) -> str:
    """`text` with the names of settings replaced by their flags, except names that are ordinary words."""
    known = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{known})(?![\w/-]|\.\w)", lambda found: flag_of(found[0]), text)


def check_public_url(url: str) -> None:
    """Raises InvalidArgument for anything but a scheme and a host."""
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not host or "/" in host:
        raise InvalidArgument("public_url", f"{url} is not https://HOST without a path")


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= MAX_PORT:
        raise InvalidArgument(name, f"{port} is not between 0 and {MAX_PORT}")

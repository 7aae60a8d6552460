"""Settings of a gateway."""

import msgspec

from longleaf.config import LOOPBACK
from longleaf.errors import InvalidArgument
from longleaf.service_settings import MAX_PORT, LogFormat, LogLevel, check_public_url, is_loopback

DEFAULT_HTTP_PORT = 8000
MAX_DRAIN_SECONDS = 24 * 3600


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and access rules of a gateway, and the address of its service."""

    server: str | None = None
    """Address of the service; None: LONGLEAF_SERVER, else this machine."""
    tls_ca: str | None = None
    """File with the certificate authorities of the service; None: from the environment; "": none."""
    server_tls_cert: str | None = None
    """File with the gateway's client certificate, if the service requires one."""
    server_tls_key: str | None = None
    host: str = LOOPBACK
    port: int = DEFAULT_HTTP_PORT
    """0 lets the system choose."""
    tls_cert: str | None = None
    """File with the gateway's certificate, reloaded when it changes; None: plain text connections."""
    tls_key: str | None = None
    insecure: bool = False
    """Permits listening on other than loopback addresses without TLS, and sending credentials to another machine in
    plain text."""
    allow_host: tuple[str, ...] = ()
    """Accepted host names besides addresses and localhost."""
    public_url: str | None = None
    """External URL if there is a reverse proxy, such as https://books.example."""
    max_connections: int = 1024
    """Further connections get 503."""
    drain_seconds: float = 3.0
    """Time that running requests get to finish after a signal."""
    metrics_port: int | None = None
    """Port of metrics for Prometheus; 0 lets the system choose; None: no metrics."""
    metrics_host: str = LOOPBACK
    """Address of that port."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    as_json: bool = False
    """Print the address as a JSON object instead of a text line."""
    with_parent: bool = False
    """Stop at the end of standard input, which means that the parent process has exited."""

    def check(self) -> None:
        """Raises InvalidArgument naming the first invalid setting."""
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"requires {other}")
        for name, port in (("port", self.port), ("metrics_port", self.metrics_port)):
            if port is not None and not 0 <= port <= MAX_PORT:
                raise InvalidArgument(name, f"{port} is not between 0 and {MAX_PORT}")
        if not 0 <= self.drain_seconds <= MAX_DRAIN_SECONDS:
            raise InvalidArgument("drain_seconds", f"{self.drain_seconds:g} is not between 0 and {MAX_DRAIN_SECONDS:,}")
        if self.max_connections < 1:
            raise InvalidArgument("max_connections", f"{self.max_connections} is not positive")
        if self.public_url is not None:
            check_public_url(self.public_url)
        if not (is_loopback(self.host) or self.insecure or self.tls_cert is not None):
            rule = f"{self.host} can be reached from other machines: give --tls-cert or --insecure"
            raise InvalidArgument("host", rule)

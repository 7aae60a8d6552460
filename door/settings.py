"""What a door is told when it starts."""

import msgspec

from longleaf.config import LOOPBACK
from longleaf.errors import InvalidArgument
from longleaf.service_settings import MAX_PORT, LogFormat, LogLevel, check_public_url, is_loopback

DEFAULT_HTTP_PORT = 8000
MAX_DRAIN_SECONDS = 24 * 3600


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a door listens, whom it lets in, and where its service is."""

    server: str | None = None
    """Address of the service; None: LONGLEAF_SERVER, else this machine."""
    tls_ca: str | None = None
    """File of the authorities of the service's certificate; None: as the environment says. "" is none."""
    server_tls_cert: str | None = None
    """File of the door's own certificate for the service, where that asks for one."""
    server_tls_key: str | None = None
    host: str = LOOPBACK
    port: int = DEFAULT_HTTP_PORT
    """0 lets the system choose."""
    tls_cert: str | None = None
    """File of the certificate that callers see, read again when it changes; None: connections are plain."""
    tls_key: str | None = None
    insecure: bool = False
    """Listen beyond this machine without TLS, and let credentials go on to another machine in plain text."""
    allow_host: tuple[str, ...] = ()
    """Names under which callers may reach it, beside addresses and localhost."""
    public_url: str | None = None
    """What callers see of it where a proxy stands in front, such as https://books.example."""
    max_connections: int = 1024
    """What comes beyond them gets 503."""
    drain_seconds: float = 3.0
    """How long what runs may take to end, after a signal."""
    metrics_port: int | None = None
    """Port of metrics for Prometheus; 0 lets the system choose; None: there is none."""
    metrics_host: str = LOOPBACK
    """Address of that port."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    as_json: bool = False
    """Tell the address as a JSON object instead of a line for people."""
    with_parent: bool = False
    """End when standard input does: whoever started this is gone then."""

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that makes no sense."""
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"needs {other}: a certificate is nothing without its key")
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
            rule = f"{self.host} can be reached from other machines: give --tls-cert, or say --insecure"
            raise InvalidArgument("host", rule)

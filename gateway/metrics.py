"""Prometheus metrics of a gateway: open streams, requests by route and status, bytes.

Imported only if metrics are enabled, because it requires prometheus_client.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longleaf.config import join_address
from longleaf.metrics_server import PATH, MetricsServer

METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE"})
"""Methods of the routes; other methods, which callers may send, are counted together."""
NO_ROUTE = "-"
LEFT = 499
"""Status of a request whose client disconnected."""
EVENTS = b"text/event-stream"


class GatewayMetrics:
    """ASGI middleware that counts requests. Lifecycle: start, stop."""

    def __init__(self, app: ASGIApp) -> None:
        disable_created_metrics()
        registry = CollectorRegistry(auto_describe=False)
        self._app, self._registry = app, registry
        message = "Responses of events that are open: answers, uploads, and watches of the cluster."
        self._streams = Gauge("longleaf_gateway_streams", message, registry=registry)
        names = ("method", "route", "code")
        self._requests = Counter(
            "longleaf_gateway_requests_total", "Requests that have ended.", names, registry=registry
        )
        message = "Bytes of bodies that came from callers."
        self._received = Counter("longleaf_gateway_received_bytes_total", message, registry=registry)
        message = "Bytes of bodies that went to callers."
        self._sent = Counter("longleaf_gateway_sent_bytes_total", message, registry=registry)
        self._port = MetricsServer(self.render, CONTENT_TYPE_PLAIN_0_0_4)

    async def start(self, host: str, port: int) -> str:
        """Listens, and returns the URL of the metrics. Raises StartError."""
        return f"http://{join_address(host, await self._port.start(host, port))}{PATH}"

    async def render(self) -> bytes:
        """The current metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    async def stop(self) -> None:
        """Closes all connections. Idempotent."""
        await self._port.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_stream = LEFT, False

        async def received() -> Message:
            message = await receive()
            self._received.inc(len(message.get("body", b"")))
            return message

        async def sent(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status, is_stream = message["status"], _is_stream(message)
                self._streams.inc(is_stream)
            await send(message)
            self._sent.inc(len(message.get("body", b"")))

        try:
            await self._app(scope, received, sent)
        finally:
            self._streams.dec(is_stream)
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._requests.labels(method, route, str(status)).inc()


def _is_stream(start: Message) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(EVENTS) for name, value in start["headers"])

"""The gRPC server: the services, health and reflection on one port, and optionally health without the rest on
another."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]
from grpc_reflection.v1alpha import reflection  # pyright: ignore[reportMissingTypeStubs]

from coordinator.auth.authenticator import AllowAnonymous, Authenticator
from coordinator.grpc_server.certificates import Certificates
from coordinator.grpc_server.health import HealthServicer
from coordinator.grpc_server.interceptors import CallInterceptor
from coordinator.grpc_server.listener import Listener
from coordinator.grpc_server.readiness_gate import ReadinessGate
from coordinator.grpc_server.request_limiter import MAX_CALLS, RequestLimiter
from coordinator.grpc_server.servicers import (
    ClusterServicer,
    ContextServicer,
    Drain,
    GenerationServicer,
    Refill,
    TokenizerServicer,
)
from coordinator.handlers.application import Application
from coordinator.telemetry.observers import NO_OBSERVERS, Observers
from longleaf.config import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, MAX_SECONDS
from longleaf.errors import LongleafError, Unavailable
from longleaf.resources import max_files
from longleaf.types import Draining
from longleaf.v1 import (
    cluster_service_pb2_grpc,
    context_service_pb2_grpc,
    generation_service_pb2_grpc,
    tokenizer_service_pb2_grpc,
)

MAX_PENDING_CALLS = 2 * MAX_CALLS
"""Most calls that have arrived and are not yet processed. Beyond this limit, 1000 by default, the library drops some
calls without a reply; one connection can send as many calls as may be open."""
SERVICES = tuple(f"longleaf.v1.{name}Service" for name in ("Generation", "Context", "Tokenizer", "Cluster"))
LIVENESS = "liveness"
"""Name of the health check for whether the process should stay alive; independent of the model."""
LOADING_SECONDS, DRAINING_SECONDS = 2.0, 1.0
"""Seconds until a retry: with this service, and with the one that replaces it."""
MAX_METADATA_BYTES = 16 << 10
"""Bytes of a call's headers; the library rejects calls with more."""
LIBRARY = "grpc._cython.cygrpc"
"""The logger of the library."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS // 2),  # one connection leaves capacity for others
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_connection_age_ms", 3_600_000),  # renews certificates and balances load; running calls continue
    ("grpc.max_connection_idle_ms", 300_000),  # connections are limited: idle ones are closed
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not shared
    ("grpc.keepalive_time_ms", 30_000),  # detects clients that vanished, and frees their resources
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # keepalive pings of clients are no flood
)


ANYBODY = AllowAnonymous()


def _loading() -> LongleafError:
    return Unavailable("loading", LOADING_SECONDS)


async def _undrained(_: bool) -> Draining:
    raise Unavailable("this server does not support Drain")


def _unfilled() -> int:
    raise Unavailable("this server does not support refilling slots")


class GrpcServer:
    """The gRPC server. It may listen before the model is loaded: until `open`, calls get the error of `loading`. A
    stream that its client does not read for `unread_timeout` seconds is ended. `drain` ends the service, `refill`
    starts ranks in slots that were abandoned. With `certificates` connections are encrypted."""

    def __init__(
        self,
        use_cases: Application | None = None,
        unread_timeout: float = MAX_SECONDS,
        *,
        loading: Callable[[], LongleafError] = _loading,
        drain: Drain = _undrained,
        refill: Refill = _unfilled,
        authenticator: Authenticator = ANYBODY,
        observers: Observers = NO_OBSERVERS,
        certificates: Certificates | None = None,
    ) -> None:
        self._readiness = readiness = ReadinessGate(loading)
        if use_cases is not None:
            readiness.open(use_cases)
        self._interceptor = interceptor = CallInterceptor(
            readiness, RequestLimiter(), unread_timeout, authenticator, observers
        )
        self._health = health_servicer = HealthServicer()

        def make() -> grpc.aio.Server:
            server = _make(interceptor)
            _add(server, generation_service_pb2_grpc, "GenerationService", GenerationServicer(readiness))
            _add(server, context_service_pb2_grpc, "ContextService", ContextServicer(readiness))
            _add(server, tokenizer_service_pb2_grpc, "TokenizerService", TokenizerServicer(readiness))
            _add(server, cluster_service_pb2_grpc, "ClusterService", ClusterServicer(readiness, drain, refill))
            _add(server, health_pb2_grpc, "Health", health_servicer)
            if authenticator.is_open:  # otherwise unauthenticated peers must not see the list of methods
                untyped: Any = health
                names = (*SERVICES, untyped.SERVICE_NAME, reflection.SERVICE_NAME)
                reflection.enable_server_reflection(names, server)
            return server

        self._make = make
        self._listener = Listener(make, certificates)
        self._health_listener: Listener | None = None
        self._inner: grpc.aio.Server | None = None
        """Serves the Unix socket."""

    async def start(self, host: str, port: int, unix: str | None = None) -> int:
        """Listens on `host`:`port`, and in plain text on the socket `unix`. Returns the port; for 0 the system chooses
        it. From now on the server is alive; it is healthy once the model can be used.

        Raises StartError if the address is not available.
        """
        self._publish_health(self._readiness.is_open)
        self._health.set(LIVENESS, True)
        bound = await self._listener.start(host, port)
        if unix is not None:  # not reachable by unauthenticated peers
            self._inner = self._make()
            self._inner.add_insecure_port(f"unix:{unix}")
            await self._inner.start()
        return bound

    async def start_health(self, host: str, port: int) -> int:
        """Serves only health checks on a separate port, in plain text, and returns the port. Raises StartError if the
        address is not available."""
        interceptor = CallInterceptor(self._readiness, RequestLimiter(), MAX_SECONDS, ANYBODY, NO_OBSERVERS)

        def make() -> grpc.aio.Server:
            server = _make(interceptor)
            _add(server, health_pb2_grpc, "Health", self._health)
            return server

        self._health_listener = Listener(make)
        return await self._health_listener.start(host, port)

    def open(self, use_cases: Application) -> None:
        """Accepts calls and reports healthy, unless the server is draining."""
        self._readiness.open(use_cases)
        self._publish_health(self._readiness.is_open)

    async def drain(self, seconds: float) -> None:
        """Refuses new calls and reports unhealthy. Returns when no call is running, after at most `seconds`."""
        self._readiness.close(Unavailable("the service is stopping and accepts no new calls", DRAINING_SECONDS))
        self._publish_health(False)
        await self._readiness.wait_empty(seconds)

    def end_calls(self, reason: str) -> None:
        """Ends running calls with Unavailable and that reason."""
        self._readiness.end(Unavailable(reason))

    @property
    def num_open(self) -> int:
        """Running calls."""
        return self._readiness.num_open

    def _publish_health(self, is_serving: bool) -> None:
        """Sets the health of all services that need the model."""
        for service in ("", *SERVICES):
            self._health.set(service, is_serving)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._listener.wait()

    async def stop(self, grace: float | None = None) -> None:
        """Refuses new calls, gives running calls `grace` seconds, then cancels them."""
        self._publish_health(False)
        self._health.end()
        await self._listener.stop(grace)
        if self._inner is not None:
            await self._inner.stop(grace)
        if self._health_listener is not None:
            await self._health_listener.stop(grace)
        await self._interceptor.close()


def _make(interceptor: CallInterceptor) -> grpc.aio.Server:
    """A server without ports. It accepts at most half as many connections as the process may open files, since other
    components need files as well."""
    logging.getLogger(LIBRARY).addFilter(_is_harmless)
    connections = max(1, max_files() // 2)
    options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", connections))
    return grpc.aio.server(interceptors=[interceptor], options=options)


def _is_harmless(record: logging.LogRecord) -> bool:
    """Rejects log records about headers that are not UTF-8: they quote the header, which may be a credential."""
    return not str(record.msg).startswith("Invalid encoding")


def _add(server: grpc.aio.Server, generated: Any, service: str, servicer: object) -> None:
    """Calls the generated function that registers the service; the generated module is untyped."""
    getattr(generated, f"add_{service}Servicer_to_server")(servicer, server)

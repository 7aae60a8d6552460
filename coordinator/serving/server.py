"""The gRPC server: the services, health and reflection on one port, and health alone on another."""

import socket
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]
from grpc_reflection.v1alpha import reflection  # pyright: ignore[reportMissingTypeStubs]

from coordinator.access.authenticator import Anybody, Authenticator
from coordinator.calls.use_cases import UseCases
from coordinator.serving.certificates import Certificates
from coordinator.serving.gate import MAX_CALLS, Gate
from coordinator.serving.health import HealthServicer
from coordinator.serving.interceptors import CallInterceptor
from coordinator.serving.lobby import Lobby
from coordinator.serving.servicers import (
    ClusterServicer,
    ContextServicer,
    Drain,
    GenerationServicer,
    Refill,
    TokenizerServicer,
)
from coordinator.telemetry.observers import NOBODY, Observers
from longleaf.config import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, MAX_SECONDS, join_address
from longleaf.errors import LongleafError, StartError, Unavailable
from longleaf.messages import Draining
from longleaf.v1 import (
    cluster_service_pb2_grpc,
    context_service_pb2_grpc,
    generation_service_pb2_grpc,
    tokenizer_service_pb2_grpc,
)

MAX_PENDING_CALLS = 2 * MAX_CALLS
"""Calls that arrived and were not looked at yet. Of more, by default of more than 1000, the library ends some without a
word; of one connection it takes in as many as may be open."""
SERVICES = tuple(f"longleaf.v1.{name}Service" for name in ("Generation", "Context", "Tokenizer", "Cluster"))
LIVENESS = "liveness"
"""What is asked of health whether the process should live on; it says nothing of the model."""
LOADING_SECONDS, DRAINING_SECONDS = 2.0, 1.0
"""When to come again: to this service, and to the one that takes its place."""
MAX_METADATA_BYTES = 16 << 10
"""Bytes of a call's headers: of more the library refuses the call."""
MAX_HEALTH_CALLS = 64
"""Calls that may be open at once on the port of health alone."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS // 2),  # one connection leaves room for others
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_connection_age_ms", 3_600_000),  # so that certificates and balance are renewed; what runs goes on
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not shared
    ("grpc.keepalive_time_ms", 30_000),  # notices clients that vanished, and frees what they held
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


ANYBODY = Anybody()


def check_address(host: str, port: int) -> None:
    """Raises StartError with the reason when nobody could listen on `host`:`port`; gRPC only writes it to the log."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from error


def _loading() -> LongleafError:
    return Unavailable("loading", LOADING_SECONDS)


async def _undrained(_: bool) -> Draining:
    raise Unavailable("nothing drains this server")


def _unfilled() -> int:
    raise Unavailable("nothing keeps the ranks of this server")


class Server:
    """The door for gRPC. It may be open before there is something to serve: `loading` tells callers what they wait for,
    until `open`. A stream that nobody reads for `unread_timeout` seconds is let go. `drain` ends the service, `refill`
    starts ranks in places that were given up. With `certificates` connections are encrypted."""

    def __init__(
        self,
        use_cases: UseCases | None = None,
        unread_timeout: float = MAX_SECONDS,
        *,
        loading: Callable[[], LongleafError] = _loading,
        drain: Drain = _undrained,
        refill: Refill = _unfilled,
        authenticator: Authenticator = ANYBODY,
        observers: Observers = NOBODY,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._lobby = lobby = Lobby(loading)
        if use_cases is not None:
            lobby.open(use_cases)
        interceptor = CallInterceptor(lobby, Gate(), unread_timeout, authenticator, observers)
        self._server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS)
        self._health = HealthServicer()
        self._health_server: grpc.aio.Server | None = None
        _add(self._server, generation_service_pb2_grpc, "GenerationService", GenerationServicer(lobby))
        _add(self._server, context_service_pb2_grpc, "ContextService", ContextServicer(lobby))
        _add(self._server, tokenizer_service_pb2_grpc, "TokenizerService", TokenizerServicer(lobby))
        _add(self._server, cluster_service_pb2_grpc, "ClusterService", ClusterServicer(lobby, drain, refill))
        _add(self._server, health_pb2_grpc, "Health", self._health)
        untyped: Any = health
        names = (*SERVICES, untyped.SERVICE_NAME, reflection.SERVICE_NAME)
        if authenticator.is_open:  # else strangers need not know what there is to call
            reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int, unix: str | None = None) -> int:
        """Listens on `host`:`port`, and in plain text on the socket `unix`, and returns the port, chosen by the system
        for 0. Alive from now on, and healthy
        when there is something to serve.

        Raises StartError when the address cannot be had.
        """
        bound = _listen(self._server, host, port, self._certificates)
        if unix is not None:
            self._server.add_insecure_port(f"unix:{unix}")
        self._tell_health(self._lobby.is_open)
        self._health.set(LIVENESS, True)
        await self._server.start()
        return bound

    async def start_health(self, host: str, port: int) -> int:
        """Answers health checks, and nothing else, on a port of their own, in plain text; returns it. Raises StartError
        when the address cannot be had."""
        interceptor = CallInterceptor(self._lobby, Gate(MAX_HEALTH_CALLS), MAX_SECONDS, ANYBODY, NOBODY)
        server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS)
        _add(server, health_pb2_grpc, "Health", self._health)
        bound = _listen(server, host, port, None)
        await server.start()
        self._health_server = server
        return bound

    def open(self, use_cases: UseCases) -> None:
        """Lets calls in and is healthy from now on, unless none are taken any more."""
        self._lobby.open(use_cases)
        self._tell_health(self._lobby.is_open)

    async def drain(self, seconds: float) -> None:
        """Takes no new calls, and is not healthy any more. Returns when none runs, after `seconds` at the latest."""
        self._lobby.close(Unavailable("the service is stopping, and takes no new calls", DRAINING_SECONDS))
        self._tell_health(False)
        await self._lobby.wait_empty(seconds)

    def end_calls(self, reason: str) -> None:
        """Ends the calls that run with Unavailable for that reason."""
        self._lobby.end(Unavailable(reason))

    @property
    def num_open(self) -> int:
        """Calls that run."""
        return self._lobby.num_open

    def _tell_health(self, is_serving: bool) -> None:
        """What health checks are told of the model."""
        for service in ("", *SERVICES):
            self._health.set(service, is_serving)

    async def wait(self) -> None:
        """Waits until the server has stopped."""
        await self._server.wait_for_termination()

    async def stop(self, grace: float | None = None) -> None:
        """Takes no new calls, gives those that run `grace` seconds, then cancels them."""
        self._tell_health(False)
        self._health.end()
        await self._server.stop(grace)
        if self._health_server is not None:
            await self._health_server.stop(grace)


def _add(server: grpc.aio.Server, generated: Any, service: str, servicer: object) -> None:
    """Calls the generated function that registers the service; it carries no types."""
    getattr(generated, f"add_{service}Servicer_to_server")(servicer, server)


def _listen(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None) -> int:
    """The port that `server` got. Raises StartError."""
    check_address(host, port)
    address = join_address(host, port)
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address}: port {port} was taken just now") from error

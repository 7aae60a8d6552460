"""The gRPC server: the services, health and reflection on one port."""

import socket
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]
from grpc_reflection.v1alpha import reflection  # pyright: ignore[reportMissingTypeStubs]

from coordinator.calls.use_cases import UseCases
from coordinator.serving.gate import MAX_CALLS, Gate
from coordinator.serving.interceptors import ErrorInterceptor
from coordinator.serving.servicers import (
    ClusterServicer,
    ContextServicer,
    GenerationServicer,
    TokenizerServicer,
)
from longleaf.config import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, MAX_SECONDS, join_address
from longleaf.errors import StartError
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
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS // 2),  # one connection leaves room for others
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not shared
    ("grpc.keepalive_time_ms", 30_000),  # notices clients that vanished, and frees what they held
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


def check_address(host: str, port: int) -> None:
    """Raises StartError with the reason when nobody could listen on `host`:`port`; gRPC only writes it to the log."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from error


class Server:
    """The door for gRPC. A stream that nobody reads for `unread_timeout` seconds is let go."""

    def __init__(self, use_cases: UseCases, unread_timeout: float = MAX_SECONDS) -> None:
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor(Gate(), unread_timeout)], options=OPTIONS)
        untyped: Any = health
        self._health: Any = untyped.aio.HealthServicer()
        self._add(generation_service_pb2_grpc, "GenerationService", GenerationServicer(use_cases))
        self._add(context_service_pb2_grpc, "ContextService", ContextServicer(use_cases))
        self._add(tokenizer_service_pb2_grpc, "TokenizerService", TokenizerServicer(use_cases))
        self._add(cluster_service_pb2_grpc, "ClusterService", ClusterServicer(use_cases))
        self._add(health_pb2_grpc, "Health", self._health)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _add(self, generated: Any, service: str, servicer: object) -> None:
        """Calls the generated function that registers the service; it carries no types."""
        getattr(generated, f"add_{service}Servicer_to_server")(servicer, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens on `host`:`port` and returns the port, chosen by the system for 0. Healthy from now on.

        Raises StartError when the address cannot be had.
        """
        check_address(host, port)
        try:
            bound = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise StartError(f"cannot listen on {join_address(host, port)}: port {port} was taken just now") from error
        await self._server.start()
        await self.set_serving(True)
        return bound

    async def set_serving(self, is_serving: bool) -> None:
        """What health checks are told."""
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    async def wait(self) -> None:
        """Waits until the server has stopped."""
        await self._server.wait_for_termination()

    async def stop(self, grace: float | None = None) -> None:
        """Takes no new calls, gives those that run `grace` seconds, then cancels them."""
        await self.set_serving(False)
        await self._server.stop(grace)

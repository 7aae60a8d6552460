"""The gRPC health service (grpc.health.v1): checks and watches.

The library's servicer holds a lock while it writes, so that one client which reads nothing could block the shutdown of
the service.
"""

from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]

from coordinator.change_feed import ChangeCounter
from longleaf.errors import NotFound

Request = health_pb2.HealthCheckRequest
Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Serves the health of named services. `set` and `close` do not block."""

    def __init__(self) -> None:
        self._is_serving: dict[str, bool] = {}
        self._changes = ChangeCounter()

    def set(self, service: str, is_serving: bool) -> None:
        """Sets the state of `service`."""
        self._is_serving[service] = is_serving
        self._changes.record()

    def close(self) -> None:
        """Ends all watch calls after they have received the last change."""
        self._changes.close()

    async def Check(self, request: Request, context: object) -> Response:
        if request.service not in self._is_serving:
            raise NotFound(request.service)
        return Response(status=self._status(request.service))

    async def Watch(self, request: Request, context: object) -> AsyncGenerator[Response, None]:
        sent_status: int | None = None
        while True:
            count, status = self._changes.count, self._status(request.service)
            if status != sent_status:
                sent_status = status
                yield Response(status=status)
            if self._changes.is_over:
                return
            await self._changes.after(count)

    def _status(self, service: str) -> int:
        if service not in self._is_serving:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if self._is_serving[service] else Response.NOT_SERVING

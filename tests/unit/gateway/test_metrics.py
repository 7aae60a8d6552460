"""The counters of a gateway, around an application with scripted responses."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.metrics import GatewayMetrics
from gateway.sse import EventResponse, event
from longleaf.errors import InvalidArgument
from longleaf.service_settings import GatewayConfig

ROUTES = "longleaf_gateway_requests_total"


class Caller:
    """Sends one request to an application and reads the response."""

    def __init__(self, method: str, path: str, body: bytes = b"") -> None:
        self._scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        self._body = [{"type": "http.request", "body": body, "more_body": False}]
        self.taken = b""
        self.begun, self.left = asyncio.Event(), asyncio.Event()

    async def call(self, app) -> bytes:
        async def receive():
            if self._body:
                return self._body.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            self.begun.set()
            self.taken += message.get("body", b"")

        await app(self._scope, receive, send)
        return self.taken


@pytest.fixture
def may_end():
    return asyncio.Event()


@pytest.fixture
def metrics(may_end):
    async def streamed(_: Request) -> EventResponse:
        async def events():
            yield event({"n": 1})
            await may_end.wait()

        return EventResponse(events())

    async def echo(request: Request) -> Response:
        return Response(await request.body(), 201)

    async def broken(_: Request) -> Response:
        raise RuntimeError

    routes = [Route("/stream", streamed), Route("/echo/{id}", echo, methods=["POST"]), Route("/broken", broken)]
    return GatewayMetrics(Starlette(routes=routes))


async def read_metrics(metrics: GatewayMetrics) -> dict[str, float]:
    lines = [line for line in (await metrics.render()).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_streams_are_counted_while_they_are_open(metrics, may_end):
    callers = [Caller("GET", "/stream") for _ in range(3)]
    going = [asyncio.create_task(caller.call(metrics)) for caller in callers]
    await asyncio.gather(*(caller.begun.wait() for caller in callers))
    assert (await read_metrics(metrics))["longleaf_gateway_streams"] == 3
    callers[0].left.set()
    await going[0]
    assert (await read_metrics(metrics))["longleaf_gateway_streams"] == 2
    may_end.set()
    await asyncio.gather(*going)
    found = await read_metrics(metrics)
    assert found["longleaf_gateway_streams"] == 0
    assert found[ROUTES + '{code="200",method="GET",route="/stream"}'] == 3


async def test_cancelled_stream_is_no_longer_counted(metrics):
    caller = Caller("GET", "/stream")
    going = asyncio.create_task(caller.call(metrics))
    await caller.begun.wait()
    assert (await read_metrics(metrics))["longleaf_gateway_streams"] == 1
    going.cancel()
    await asyncio.wait([going])
    assert (await read_metrics(metrics))["longleaf_gateway_streams"] == 0


async def test_requests_are_labelled_by_route_never_by_client_input(metrics):
    for name in ("one", "two"):
        await Caller("POST", f"/echo/{name}", b"x" * 1000).call(metrics)
    for word in ("BREW", "MELT"):
        await Caller(word, "/nowhere/at/all").call(metrics)
    found = await read_metrics(metrics)
    assert found[ROUTES + '{code="201",method="POST",route="/echo/{id}"}'] == 2
    assert found[ROUTES + '{code="404",method="other",route="-"}'] == 2
    assert found["longleaf_gateway_received_bytes_total"] == 2000
    assert found["longleaf_gateway_sent_bytes_total"] == 2000 + 2 * len("Not Found")


async def test_failed_requests_are_counted(metrics):
    with pytest.raises(RuntimeError):
        await Caller("GET", "/broken").call(metrics)
    assert (await read_metrics(metrics))[ROUTES + '{code="500",method="GET",route="/broken"}'] == 1


@pytest.mark.parametrize(
    "setting", [{"metrics_port": 65536}, {"metrics_port": -1}, {"drain_seconds": -1}, {"drain_seconds": float("nan")}]
)
def test_invalid_settings_are_named(setting):
    (name,) = setting
    with pytest.raises(InvalidArgument) as raised:
        GatewayConfig(**setting).check()
    assert raised.value.field == name

"""Cluster state, as one response or as events, and health checks of gateway and service."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import json_fields, json_response
from gateway.callers import client_of, with_deadline
from gateway.errors import problem_of, unavailable
from gateway.sse import HEADERS, EventResponse, event
from longleaf.client.proxy_client import ProxyClient
from longleaf.errors import LongleafError
from longleaf.types import Cluster

READY_SECONDS = 2.0
INTERVAL_SECONDS = 1.0
MODEL_FIELDS = "name architecture dtype max_context_tokens is_long_allowed has_chat_template"
CLUSTER_FIELDS = "world_size epoch running waiting merge exact exactness_note dequantization"
WORKER_FIELDS = "rank node device tokens max_tokens kv_bytes max_kv_bytes"
RECOVERY_FIELDS = "lost_tokens recovered_tokens seconds done"
DRAFTING_FIELDS = "drafted_tokens accepted_tokens tokens_per_step"
LOSS_FIELDS = "time member rank node reason slot"


def described(cluster: Cluster) -> dict[str, Any]:
    """The cluster as JSON."""
    return {
        "model": json_fields(cluster.model, MODEL_FIELDS),
        **json_fields(cluster, CLUSTER_FIELDS),
        "workers": [json_fields(worker, WORKER_FIELDS) for worker in cluster.workers],
        "recovery": cluster.recovery and json_fields(cluster.recovery, RECOVERY_FIELDS),
        "drafting": cluster.drafting and json_fields(cluster.drafting, DRAFTING_FIELDS),
        "losses": [json_fields(loss, LOSS_FIELDS) for loss in cluster.losses],
    }


async def cluster(request: Request) -> Response:
    """The cluster now and after every change; with `once=true` a single object."""
    client = client_of(request)
    if request.query_params.get("once", "false").lower() in ("true", "1"):
        return json_response(described(await with_deadline(client.cluster())))
    if request.method == "HEAD":  # a stream would never end, and transfer no body
        await with_deadline(client.cluster())
        response = Response()
        response.raw_headers = list(HEADERS)
        return response
    watching = client.watch_cluster(min_interval=INTERVAL_SECONDS)
    try:
        first = await with_deadline(anext(watching))
    except BaseException:
        await watching.aclose()
        raise
    return cast(
        Response, EventResponse(_events(first, watching), lambda: "nothing has changed", end=request.app.state.ending)
    )


async def _events(first: Cluster, watching: AsyncGenerator[Cluster, None]) -> AsyncGenerator[bytes, None]:
    yield event(described(first))
    try:
        async with aclosing(watching):
            async for found in watching:
                yield event(described(found))
    except LongleafError as error:
        yield event(problem_of(error).body, "error")


async def healthz(request: Request) -> Response:
    """Whether the gateway runs."""
    del request
    return json_response({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Whether the service can answer."""
    client: ProxyClient = request.app.state.client
    try:
        is_healthy = await client.is_healthy(timeout=READY_SECONDS)
    except LongleafError as error:
        raise unavailable(problem_of(error).message) from None
    if not is_healthy:
        raise unavailable("the service takes no calls now")
    return json_response({"status": "ok"})

"""The routes and error handlers of the gateway."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import cluster, static
from gateway.anthropic.endpoints import create_message
from gateway.bodies import BodyReader
from gateway.contexts import resources, text, upload
from gateway.contexts.upload_slots import UploadSlots
from gateway.cors import with_cors
from gateway.errors import HttpProblem, problem_of
from gateway.guards import OriginGuardMiddleware
from gateway.models import ModelNameCache
from gateway.openai import chat, completions, models
from gateway.openai.responses import endpoints as responses
from gateway.openai.responses.store import ResponseStore
from longleaf.client.proxy_client import ProxyClient
from longleaf.errors import LongleafError
from longleaf.service_settings import GatewayConfig

ROUTES = (
    ("/", "GET", static.page),
    ("/page/{path:path}", "GET", static.file),
    ("/healthz", "GET", cluster.healthz),
    ("/readyz", "GET", cluster.readyz),
    ("/v1/models", "GET", models.list_models),
    ("/v1/models/{id:path}", "GET", models.get_model),
    ("/v1/chat/completions", "POST", chat.chat),
    ("/v1/completions", "POST", completions.completions),
    ("/v1/responses", "POST", responses.create_response),
    ("/v1/responses/{id}", "GET", responses.get_response),
    ("/v1/responses/{id}", "DELETE", responses.delete_response),
    ("/v1/messages", "POST", create_message),
    ("/v1/embeddings", "POST", models.embeddings),
    ("/v1/contexts", "GET", resources.list_contexts),
    ("/v1/contexts/{id}", "HEAD", upload.upload_state),
    ("/v1/contexts/{id}", "GET", resources.get_context),
    ("/v1/contexts/{id}", "POST", upload.upload),
    ("/v1/contexts/{id}", "PATCH", resources.update_context),
    ("/v1/contexts/{id}", "DELETE", resources.delete_context),
    ("/v1/contexts/{id}/fork", "POST", resources.fork_context),
    ("/v1/contexts/{id}/text", "GET", text.get_text),
    ("/v1/cluster", "GET", cluster.cluster),
)
NO_ENDPOINT = (
    "no such endpoint: this server has /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, "
    "/v1/messages, /v1/contexts and /v1/cluster"
)


def make_app(client: ProxyClient, config: GatewayConfig, ending: asyncio.Event, stored: ResponseStore) -> ASGIApp:
    """The ASGI application, which calls the service through `client`. Setting `ending` closes all watch streams.
    `stored` has the responses of /v1/responses."""
    handlers: dict[Any, Callable[[Request, Any], Any]] = {
        HttpProblem: _on_problem,
        LongleafError: _on_error,
        HTTPException: _on_http,
        ClientDisconnect: _on_left,
        Exception: _on_failure,
    }
    app = Starlette(routes=list(_routes()), exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.client, app.state.model = client, ModelNameCache()
    app.state.bodies, app.state.ending = BodyReader(), ending
    app.state.responses = stored
    app.state.public_url = config.public_url
    app.state.upload_slots = UploadSlots()
    guarded = OriginGuardMiddleware(app, config.allow_host, config.public_url, config.allow_origin)
    # outside of the guard, so that pages of allowed origins can read its errors
    return with_cors(guarded, config.allow_origin)


def _routes() -> list[Route]:
    """One route per path, because Starlette answers 405 for methods that the first matching route lacks."""
    paths = dict[str, dict[str, Any]]()
    for path, method, endpoint in ROUTES:
        paths.setdefault(path, {})[method] = endpoint
    return [Route(path, _by_method(found), methods=list(found)) for path, found in paths.items()]


def _by_method(endpoints: dict[str, Any]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        method = request.method if request.method in endpoints else "GET"  # HEAD without a separate handler
        return await endpoints[method](request)

    return endpoint


async def _on_problem(request: Request, error: HttpProblem) -> Response:
    return Response(error.encoded(request.url.path), error.status, error.headers, "application/json")


async def _on_error(request: Request, error: LongleafError) -> Response:
    return await _on_problem(request, problem_of(error))


async def _on_http(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow", "")
    messages = {404: NO_ENDPOINT, 405: f"{request.method} is not allowed, only {allowed}"}
    if error.status_code == 404 and any(path == f"/v1{request.url.path}" for path, *_ in ROUTES):
        messages[404] = f"no such endpoint: use /v1{request.url.path} (base_url ends with /v1)"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = messages.get(error.status_code, str(error.detail))
    return await _on_problem(request, HttpProblem(error.status_code, message, code=code, headers=error.headers))


async def _on_left(request: Request, _: ClientDisconnect) -> Response:
    return await _on_problem(request, HttpProblem(499, "the client disconnected"))


async def _on_failure(request: Request, _: Exception) -> Response:
    """Does not log the error, because the outer middleware does."""
    return await _on_problem(
        request, HttpProblem(500, "internal error of the gateway; see its log", kind="server_error")
    )

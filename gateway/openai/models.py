"""The models endpoints: the served model, and each context as a model."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import json_response
from gateway.callers import client_of, with_deadline
from gateway.errors import HttpProblem
from gateway.models import missing_model, split_model
from longleaf.errors import NotFound
from longleaf.types import Context, ModelInfo


async def list_models(request: Request) -> Response:
    client = client_of(request)
    contexts = await with_deadline(client.list_contexts())
    served = (await with_deadline(client.cluster())).model
    models = [_model(served), *(_of_context(served, each) for each in contexts)]
    return json_response({"object": "list", "data": models})


async def get_model(request: Request) -> Response:
    client, requested = client_of(request), request.path_params["id"]
    cluster = await with_deadline(client.cluster())
    target = split_model(requested, cluster.model.name)
    if target.context is None:
        return json_response(_model(cluster.model))
    try:
        return json_response(_of_context(cluster.model, await with_deadline(client.get_context(target.context))))
    except NotFound:
        raise missing_model(requested) from None


async def embeddings(request: Request) -> Response:
    """Refused, because the service has no such method."""
    del request
    message = "embeddings are not supported: this server generates text, so use another server for embeddings"
    raise HttpProblem(400, message, code="unsupported_endpoint")


def _model(model: ModelInfo, context: str = "", created: float = 0) -> dict[str, Any]:
    """`max_model_len`, the maximum tokens of prompt and answer together, is null if the service has no such limit."""
    return {
        "id": f"{model.name}:{context}" if context else model.name,
        "object": "model",
        "created": int(created),
        "owned_by": "longleaf",
        "max_model_len": None if model.is_long_allowed else model.max_context_tokens or None,
    }


def _of_context(model: ModelInfo, context: Context) -> dict[str, Any]:
    more = {"context": context.id, "tokens": context.tokens, "display_name": context.display_name}
    return _model(model, context.id, context.created) | more

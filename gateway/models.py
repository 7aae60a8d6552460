"""Name of the served model, and the targets of requests that name it."""

import time
from typing import NamedTuple

from starlette.requests import Request

from gateway.callers import credential_of, with_deadline
from gateway.errors import HttpProblem
from longleaf.client import AsyncClient
from longleaf.types import CONTEXT_ID

KNOWN_SECONDS = 1.0
"""Lifetime of a cached name, because another service may start at the same address."""
MAX_CALLERS = 1024
MISSING = "model_not_found"


class ModelNameCache:
    """The last known model name per caller, since only authenticated callers may see it."""

    def __init__(self) -> None:
        self._reported = dict[int, tuple[str, float]]()

    def record(self, caller: int, name: str) -> None:
        if len(self._reported) >= MAX_CALLERS:
            self._reported.clear()
        self._reported[caller] = name, time.monotonic()

    def name_for(self, caller: int) -> str | None:
        """None if the service must be asked."""
        name, reported_at = self._reported.get(caller, (None, 0.0))
        return name if time.monotonic() - reported_at < KNOWN_SECONDS else None


async def model_name(request: Request, client: AsyncClient) -> str:
    """The model name from the service, which authenticates the caller."""
    known: ModelNameCache = request.app.state.model
    caller = hash(credential_of(request))  # a hash, because credentials are not stored
    name = known.name_for(caller)
    if name is None:
        name = (await with_deadline(client.cluster())).model.name
        known.record(caller, name)
    return name


class ModelTarget(NamedTuple):
    """The model and the context that a request names."""

    model: str
    """The name in the request."""
    context: str | None


def target_of(served: str, model: str, context: str | None) -> ModelTarget:
    """The target of a request with this model and, optionally, this context; `served` is the name of the served model.
    Raises HttpProblem."""
    target = split_model(model, served)
    if context is None or target.context == context:
        return target
    if target.context is not None:
        message = f"context: is {context[:100]}, and model names {target.context}"
        raise HttpProblem(400, message, param="context", code="invalid_value")
    if CONTEXT_ID.fullmatch(context) is None:
        raise HttpProblem(400, "context: is not a valid context name", param="context", code="invalid_value")
    return ModelTarget(model, context)


def split_model(requested: str, name: str) -> ModelTarget:
    """Raises HttpProblem unless the name is that of the model, or of a context as a model."""
    if requested == name:
        return ModelTarget(requested, None)
    context = requested.removeprefix(f"{name}:")
    if context == requested or CONTEXT_ID.fullmatch(context) is None:
        raise missing_model(requested)
    return ModelTarget(requested, context)


def missing_model(requested: str) -> HttpProblem:
    return HttpProblem(404, f"the model {requested[:300]} does not exist", param="model", code=MISSING)

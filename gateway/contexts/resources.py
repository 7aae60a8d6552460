"""Existing contexts: list, get, update, fork and delete."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import converted, json_fields, json_of, json_response
from gateway.callers import client_of, with_deadline
from gateway.errors import HttpProblem, problem_of
from gateway.models import model_name
from longleaf.client import AsyncClient
from longleaf.errors import LongleafError, NotFound
from longleaf.types import CONTEXT_ID, MAX_TIME, Context

MISSING = "context_not_found"
Seconds = Annotated[float, Meta(ge=-MAX_TIME, le=MAX_TIME)]


class ContextPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changeable fields of a context."""

    display_name: str | UnsetType = UNSET
    is_pinned: bool | UnsetType = msgspec.field(default=UNSET, name="pinned")
    expires: Seconds | UnsetType | None = UNSET
    ttl: Seconds | UnsetType = UNSET


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a context of the first tokens of another one."""

    id: str
    tokens: int | None = None
    recompute: bool = False


CONTEXT_FIELDS = (
    "tokens kv_bytes storage_bytes created updated used expires display_name pinned state hits exact exactness_note "
    "dequantization"
)


def described(context: Context, model: str) -> dict[str, Any]:
    """A context as JSON."""
    return {
        "id": context.id,
        "object": "context",
        "model": f"{model}:{context.id}",
        **json_fields(context, CONTEXT_FIELDS),
        "capacity": context.positions.capacity,
        "shares": context.shares,
    }


def context_problem(error: LongleafError) -> HttpProblem:
    return problem_of(error, {"context": "id", "config.context": "id", "new_name": "id"}, MISSING)


def check_new(name: str) -> None:
    """Raises HttpProblem for an invalid name of a new context."""
    if CONTEXT_ID.fullmatch(name) is None:
        message = (
            f"id: {name[:100]!r} is not valid: 1 to 63 of a-z, 0-9, '.', '_' and '-', the first and last a-z or 0-9"
        )
        raise HttpProblem(400, message, param="id", code="invalid_value")


def context_from_path(request: Request) -> str:
    """The context in the path. Raises NotFound for an invalid name."""
    name = request.path_params["id"]
    if CONTEXT_ID.fullmatch(name) is None:
        raise context_problem(NotFound(f"contexts/{name[:100]}"))
    return name


async def list_contexts(request: Request) -> Response:
    client = client_of(request)
    contexts = await with_deadline(client.list_contexts())
    model = await model_name(request, client)
    return json_response({"object": "list", "data": [described(context, model) for context in contexts]})


async def get_context(request: Request) -> Response:
    client, name = client_of(request), context_from_path(request)
    return await _context_response(request, client, await _call_service(client.get_context(name)))


async def update_context(request: Request) -> Response:
    client, name = client_of(request), context_from_path(request)
    await model_name(request, client)  # authenticates the caller before the body is read
    changes = converted(await json_of(request), ContextPatch)
    given: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(changes).items() if value is not UNSET
    }
    if not given:
        raise HttpProblem(400, f"give at least one of {', '.join(ContextPatch.__struct_encode_fields__)}")
    return await _context_response(request, client, await _call_service(client.update_context(name, **given)))


async def delete_context(request: Request) -> Response:
    """Deletes the context or, with an upload id, cancels that upload and keeps the context."""
    client, name, given = client_of(request), context_from_path(request), dict(request.query_params)
    upload_id = given.pop("upload_id", None)
    if given:
        raise HttpProblem(400, f"unknown parameter: {min(given)}", param=min(given))
    if upload_id == "":  # a missing value does not mean the context
        raise HttpProblem(400, "upload_id: is required", param="upload_id")
    await _call_service(client.delete_context(name) if upload_id is None else client.cancel_ingest(name, upload_id))
    return Response(status_code=204)


async def fork_context(request: Request) -> Response:
    client, name = client_of(request), context_from_path(request)
    await model_name(request, client)
    fork = converted(await json_of(request), Fork)
    check_new(fork.id)
    made = await _call_service(client.fork_context(name, fork.id, num_tokens=fork.tokens, recompute=fork.recompute))
    found = described(made, await model_name(request, client))
    return json_response(found | {"recomputed_tokens": made.recomputed_tokens}, 201)


async def _context_response(request: Request, client: AsyncClient, context: Context, status: int = 200) -> Response:
    return json_response(described(context, await model_name(request, client)), status)


async def _call_service(call: Any) -> Any:
    try:
        return await with_deadline(call)
    except LongleafError as error:
        raise context_problem(error) from None

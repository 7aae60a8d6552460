"""POST /v1/responses, and stored responses."""

from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import MemoryLease, body_of, json_response, share_of
from gateway.callers import client_of, owner_of, peer_of
from gateway.errors import HttpProblem, problem_of, renamed
from gateway.generations import GenerationEvents, PendingAnswer, respond
from gateway.models import MISSING, model_name, target_of
from gateway.openai.chat import NAMES as CHAT_NAMES
from gateway.openai.chat import generate_options
from gateway.openai.field_names import FieldNames
from gateway.openai.responses.answers import ResponseFormatter
from gateway.openai.responses.requests import NAMES, decode_response_request
from gateway.openai.responses.store import ConversationTurn, ResponseStore, StoredResponse
from longleaf.errors import LongleafError
from longleaf.types import Conversation, Message

PREVIOUS = "previous_response_id"


async def create_response(request: Request) -> Response:
    with share_of(request) as share:
        return await respond(request, await _start_response(request, share), share)


async def get_response(request: Request) -> Response:
    stored = _stored(request, await _owner(request), request.path_params["id"])
    if "true" in (request.query_params.get("stream"), request.query_params.get("background")):
        raise HttpProblem(400, "stream: is not supported for stored responses", param="stream")
    return Response(stored.encoded, media_type="application/json")


async def delete_response(request: Request) -> Response:
    owner, response_id = await _owner(request), request.path_params["id"]
    if not _store_of(request).remove(owner, response_id):
        raise _missing(response_id, "response_not_found")
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _start_response(request: Request, share: MemoryLease) -> PendingAnswer:
    client, owner = client_of(request), owner_of(request)
    served = await model_name(request, client)  # authenticates the caller before the body is read
    decoded = await body_of(request, share, decode_response_request)
    requested, chat = decoded.requested, decoded.chat
    target = target_of(served, chat.model, chat.context)
    previous = None
    if requested.previous_response_id is not None:
        previous = _stored(request, owner, requested.previous_response_id, PREVIOUS).turn
    history = previous.conversation() if previous is not None else ()
    names = ["instructions"] * len(decoded.instructions) + [PREVIOUS] * len(history)
    rename = FieldNames(NAMES, (*names, *decoded.names))
    conversation = Conversation((*decoded.instructions, *history, *decoded.messages))
    try:
        options = generate_options(chat, peer_of(request))
    except HttpProblem as problem:
        raise renamed(problem, rename) from None
    store = _store_of(request)
    turn = ConversationTurn(owner, previous, decoded.messages if requested.store else ())
    add = partial(_add_response, store, turn) if requested.store else _no_store
    fields = requested.shown_fields() | {"model": target.model}
    events = client.generate(conversation, context=target.context, **options)
    events = _counted(events, store, turn, len(msgspec.json.encode(fields)))
    formatter = ResponseFormatter(fields, add)
    return PendingAnswer(events, formatter, requested.stream, partial(_problem, rename=rename), decoded.ignored)


async def _counted(
    events: GenerationEvents, store: ResponseStore, turn: ConversationTurn, num_bytes: int
) -> GenerationEvents:
    """The events, while the store counts the texts that the response still needs."""
    with store.running(turn, num_bytes):
        async with aclosing(events):
            async for each in events:
                yield each


def _add_response(
    store: ResponseStore, turn: ConversationTurn, response_id: str, encoded: bytes, answer: Message
) -> None:
    store.add(ConversationTurn(turn.owner, turn.previous, (*turn.messages, answer), response_id), encoded)


def _no_store(response_id: str, encoded: bytes, answer: Message) -> None:
    del response_id, encoded, answer


def _problem(error: LongleafError, rename: Callable[[str], str]) -> HttpProblem:
    return renamed(problem_of(error, CHAT_NAMES | {"context": "model"}, MISSING), rename)


async def _owner(request: Request) -> str:
    """The owner of the caller's responses. Raises Unauthenticated."""
    await model_name(request, client_of(request))
    return owner_of(request)


def _stored(request: Request, owner: str, response_id: str, param: str | None = None) -> StoredResponse:
    """Raises HttpProblem."""
    stored = _store_of(request).get(owner, response_id)
    if stored is None:
        raise _missing(response_id, f"{param.removesuffix('_id')}_not_found" if param else "response_not_found", param)
    return stored


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _missing(response_id: str, code: str, param: str | None = None) -> HttpProblem:
    message = f"the response {response_id[:100]} does not exist: it was deleted or not stored, or it has expired"
    return HttpProblem(404, message, param=param, code=code)

"""POST /v1/messages."""

import uuid
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.anthropic.answers import PING, MessageFormatter
from gateway.anthropic.requests import decode_messages
from gateway.bodies import MemoryLease, body_of, share_of
from gateway.callers import client_of, peer_of
from gateway.errors import HttpProblem, problem_of, renamed
from gateway.generations import PendingAnswer, respond
from gateway.models import MISSING, model_name, target_of
from gateway.openai.chat import NAMES, generate_options
from longleaf.errors import LongleafError


async def create_message(request: Request) -> Response:
    with share_of(request) as share:
        return await respond(request, await _start_message(request, share), share)


async def _start_message(request: Request, share: MemoryLease) -> PendingAnswer:
    """Only the return value references the conversation."""
    client = client_of(request)
    served = await model_name(request, client)  # authenticates the caller before the body is read
    chat, conversation, ignored, rename, shows_thinking = await body_of(request, share, decode_messages)
    target = target_of(served, chat.model, chat.context)
    try:
        options = generate_options(chat, peer_of(request))
    except HttpProblem as problem:
        raise renamed(problem, rename) from None
    events = client.generate(conversation, context=target.context, **options)
    formatter = MessageFormatter(f"msg_{uuid.uuid4().hex}", target.model, shows_thinking=shows_thinking)
    return PendingAnswer(events, formatter, chat.stream, partial(_problem, rename=rename), ignored, PING)


def _problem(error: LongleafError, rename: Callable[[str], str]) -> HttpProblem:
    return renamed(problem_of(error, NAMES | {"context": "model"}, MISSING), rename)

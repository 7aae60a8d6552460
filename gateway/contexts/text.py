"""GET /v1/contexts/ID/text: a part of a context's text."""

from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import json_fields, json_response
from gateway.callers import client_of, with_deadline
from gateway.contexts.resources import MISSING, context_from_path
from gateway.errors import HttpProblem, problem_of
from longleaf.errors import LongleafError

RANGES = ("token_start", "token_end", "byte_start", "byte_end")
FORMATS = ("json", "text")
FIELDS = "text token_start token_end byte_start byte_end file line last_file"
NAMES = {"context": "id", "range": "token_start", "token_range": "token_end", "byte_range": "byte_end"}


async def get_text(request: Request) -> Response:
    """The text of a range of tokens or bytes with its position; `format=text` returns only the text."""
    client, name, given = client_of(request), context_from_path(request), dict(request.query_params)
    chosen = given.pop("format", "json")
    if chosen not in FORMATS:
        raise HttpProblem(400, "format: must be json or text", param="format", code="invalid_value")
    if unknown := given.keys() - set(RANGES):
        raise HttpProblem(400, f"unknown parameter: {min(unknown)[:100]}", param=min(unknown)[:100])
    starts_and_ends = {each: _number(each, value) for each, value in given.items()}
    try:
        found = await with_deadline(client.get_context_text(name, **starts_and_ends))
    except LongleafError as error:
        raise problem_of(error, NAMES, MISSING) from None
    if chosen == "text":
        return Response(found.text.encode(), media_type="text/plain; charset=utf-8")
    return json_response({"id": name, "object": "context.text", **json_fields(found, FIELDS)})


def text_path(context: str, token_start: int, token_end: int) -> str:
    """The path and query of the text of tokens [start, end)."""
    query = urlencode({"token_start": token_start, "token_end": token_end, "format": "text"})
    return f"/v1/contexts/{context}/text?{query}"


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise HttpProblem(400, f"{name}: is not a number of tokens or bytes", param=name, code="invalid_value")
    return int(value)

"""Conversion of the text of a tool call to a name and arguments."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from coordinator.text.answer_formats import CallFormat, HeadedCalls, JsonCalls, TaggedCalls, ToolParameters
from longleaf.types.tools import refuse_constant

MAX_DIGITS = 1000
"""Digits of the longest integer that is not rounded to a float."""


class Call(NamedTuple):
    """A call of a function of the request."""

    name: str
    arguments: str
    """A JSON object, in valid JSON."""


def calls_of(body: str, calls: CallFormat, tools: ToolParameters) -> list[Call] | None:
    """The calls in the text between the markers of a call; None if it is not valid, or calls an unknown function."""
    try:
        match calls.body:
            case JsonCalls():
                found = _json_calls(body, calls.body)
            case HeadedCalls():
                found = [_headed_call(body, calls.body)]
            case TaggedCalls():
                found = [_tagged_call(body, calls.body, tools)]
    except (ValueError, RecursionError):
        return None
    return found if found and all(call.name in tools for call in found) else None


def json_call(name: str, arguments: str, tools: ToolParameters) -> Call | None:
    """A call with these arguments; None unless they are a JSON object and the function is known."""
    try:
        return Call(name, encoded_arguments(_parse(arguments))) if name in tools else None
    except (ValueError, RecursionError):
        return None


def encoded_arguments(found: object) -> str:
    """Arguments as valid JSON; an object that is encoded as a string is decoded first. Raises ValueError unless they
    are an object."""
    if isinstance(found, str):
        found = _parse(found)
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise ValueError("the arguments are not an object")
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which is no text but may be escaped
        return json.dumps(found)
    return text


def _parse(text: str) -> Any:
    """Parses strict JSON. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=refuse_constant, parse_float=_finite_float, parse_int=_integer)


def _finite_float(text: str) -> float:
    """A number beyond the range of floats, which JSON has, becomes the nearest float."""
    found = float(text)
    return found if math.isfinite(found) else math.copysign(sys.float_info.max, found)


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= MAX_DIGITS else _finite_float(text)


def _json_calls(body: str, form: JsonCalls) -> list[Call]:
    found = _parse(body)
    return [_json_object(each, form) for each in (cast(list[Any], found) if isinstance(found, list) else [found])]


def _json_object(found: object, form: JsonCalls) -> Call:
    if not isinstance(found, dict):
        raise ValueError("a call is not an object")
    members = cast(dict[str, Any], found)
    name = members.get("name")
    given = [members[key] for key in form.arguments if key in members]
    if not isinstance(name, str) or len(given) > 1 or (form.has_arguments and not given):
        raise ValueError("a call has no name or arguments")
    return Call(name, encoded_arguments(given[0] if given else {}))


def _headed_call(body: str, form: HeadedCalls) -> Call:
    if (head := form.head.match(body)) is None:
        raise ValueError("a call has no name")
    groups = head.groupdict()
    arguments = body[head.end() :].strip()
    if form.tail:
        arguments = arguments.removesuffix(form.tail)
    return Call(next(name for name in groups.values() if name), encoded_arguments(_parse(arguments)))


def _tagged_call(body: str, form: TaggedCalls, tools: Mapping[str, frozenset[str]]) -> Call:
    if (head := form.head.match(body)) is None:
        raise ValueError("a call has no name")
    name, at, arguments = head["name"], head.end(), dict[str, Any]()
    while (pair := form.pair.match(body, at)) is not None:
        key, value = pair["key"].strip(), pair["value"]
        arguments[key] = value if key in tools.get(name, ()) else _value_of(value)
        at = pair.end()
    if body[at:].strip() not in ("", "</function>"):
        raise ValueError("a call has other text than arguments")
    return Call(name, encoded_arguments(arguments))


def _value_of(text: str) -> object:
    """A value in JSON, or else as text."""
    try:
        return _parse(text)
    except (ValueError, RecursionError):
        return text

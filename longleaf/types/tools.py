"""Tools that a model may call, in OpenAI's form."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from longleaf.errors import InvalidArgument

MAX_TOOLS = 128
"""Maximum number of tools per request."""
MAX_TOOL_BYTES = 1 << 20
"""Maximum bytes of all tools of a request, as JSON."""
MAX_DEPTH = 64
"""Maximum nesting of a tool definition and of arguments in a conversation."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TOOL_NAME_RULE = "must be 1 to 128 characters of a-z, A-Z, 0-9, '_', '.', '-'"


def is_json_object(text: str) -> bool:
    """Whether the text is a JSON object in valid JSON, nested at most MAX_DEPTH levels deep."""
    try:
        found = parse_json(text)
        return isinstance(found, dict) and _depth(cast(object, found)) <= MAX_DEPTH
    except (ValueError, RecursionError):
        return False


def parse_json(text: str) -> Any:
    """Parses strict JSON: without NaN. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=refuse_constant)


def refuse_constant(name: str) -> NoReturn:
    """Raises ValueError for a constant that Python's parser accepts and JSON lacks, such as NaN."""
    raise ValueError(f"{name} is not JSON")


def check_tools(tools: Sequence[object]) -> tuple[dict[str, Any], ...]:
    """The definitions. Raises InvalidArgument that names the invalid field."""
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"has {len(tools):,} tools; the limit is {MAX_TOOLS}")
    checked, names = list[dict[str, Any]](), set[str]()
    for i, tool in enumerate(tools):
        definition = _object(tool, f"tools[{i}]")
        if definition.get("type") != "function":
            raise InvalidArgument(f"tools[{i}].type", "must be function")
        function = _object(definition.get("function"), f"tools[{i}].function")
        name = function.get("name")
        if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
            raise InvalidArgument(f"tools[{i}].function.name", TOOL_NAME_RULE)
        if name in names:
            raise InvalidArgument(f"tools[{i}].function.name", f"{name} is defined twice")
        if not isinstance(function.get("description"), str | None):
            raise InvalidArgument(f"tools[{i}].function.description", "must be a string")
        if function.get("parameters") is not None:
            _object(function["parameters"], f"tools[{i}].function.parameters")
        if not isinstance(function.get("strict"), bool | None):
            raise InvalidArgument(f"tools[{i}].function.strict", "must be true or false")
        if _depth(definition) > MAX_DEPTH:
            raise InvalidArgument(f"tools[{i}]", f"is nested more than {MAX_DEPTH} levels deep")
        names.add(name)
        checked.append(definition)
    return tuple(checked)


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(field, "must be an object")
    return cast(dict[str, Any], value)


def _depth(value: object) -> int:
    """Levels of nesting, counted up to one more than MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level = [item for each in level for item in _items(each)]
        depth += 1
    return depth


def _items(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        return list(cast(Mapping[str, Any], value).values())
    return cast(list[Any], value) if isinstance(value, list) else []

"""Rules of grammars for the arguments of calls in tags, where values are JSON, or text for parameters of type string.

A value ends at the first tag that may end it, even within a JSON string. Therefore strings in JSON values cannot
contain `</`, and each value needs a type: values of any type are refused, by the path of their schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from longleaf.errors import InvalidArgument
from longleaf.grammars.lark import ANY, json_rule, pattern_of

NOTES = frozenset("$schema $id $comment title description default examples deprecated readOnly writeOnly".split())
"""Keywords that permit and exclude nothing."""
DEFINITIONS = ("$defs", "definitions")
ROOT = frozenset(("type", "properties", "required", "additionalProperties", *DEFINITIONS)) | NOTES
TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not", "if", "$ref")
"""Keywords that cannot be honoured for parameters of type string."""
TYPING = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
NO_TAG = r"^([^<]|<+[^/<])*<*$"
"""Matches strings without an end tag."""
_KEY = re.compile(r"[^<>\s](?:[^<>]*[^<>\s])?")


def tagged_arguments(
    rule: str, pair: tuple[str, str, str], end: str, schema: Mapping[str, Any] | None, field: str
) -> list[str]:
    """The lines of a rule for the arguments that a schema accepts, or for any arguments.

    `pair` is the text before a value with `{key}`, the text after it, and the tag in that which ends it; `end` ends the
    call. Properties have the order of the schema. Raises InvalidArgument naming the path of a schema, below `field`,
    that cannot be honoured.
    """
    before, after, tag = pair
    if schema is None:
        head, tail = (json.dumps(each) for each in before.split("{key}"))
        lines = [f"{rule}: ({head} {rule}_key {tail} {rule}_text)*", f"{rule}_key: /[A-Za-z0-9_.-]{{1,64}}/"]
        return [*lines, _text_line(f"{rule}_text", after, tag, end)]
    for name in schema:
        if name not in ROOT:
            raise InvalidArgument(f"{field}.{name}", "is not supported in the model's format of calls")
    properties = cast(dict[str, Any], schema.get("properties") or {})
    required = cast(list[str], schema.get("required") or [])
    if missing := [name for name in required if name not in properties]:
        raise InvalidArgument(f"{field}.required", f"{missing[0]} is no property")
    definitions = {
        group: {name: _tagless(each, f"{field}.{group}.{name}") for name, each in schema[group].items()}
        for group in DEFINITIONS
        if isinstance(schema.get(group), dict)
    }
    parts, lines = list[str](), list[str]()
    for i, (name, given) in enumerate(properties.items()):
        path, value = f"{field}.properties.{name}", f"{rule}_{i}"
        if _KEY.fullmatch(name) is None:
            raise InvalidArgument(path, "this name is not supported in the model's format of calls")
        part = f"{json.dumps(before.replace('{key}', name), ensure_ascii=False)} {value}"
        parts.append(part if name in required else f"({part})?")
        if "string" in _types(given):
            lines += _string_lines(value, given, (after, tag, end), path)
        else:
            json_value = json_rule({**_tagless(given, path), **definitions})
            lines += [f"{value}: {value}_json {json.dumps(after)}", f"{value}_json: {json_value}"]
    return [f"{rule}: {' '.join(parts) or json.dumps('')}", *lines]


def _string_lines(rule: str, schema: Mapping[str, Any], ends: tuple[str, str, str], path: str) -> list[str]:
    """The value of a parameter of type string, and the text after it."""
    after, tag, end = ends
    if unsupported := [name for name in TEXT_LIMITS if name in schema]:
        raise InvalidArgument(f"{path}.{unsupported[0]}", "is not supported for strings in the model's format of calls")
    if "enum" not in schema and "const" not in schema:
        return [_text_line(rule, after, tag, end)]
    permitted: list[Any] = schema["enum"] if "enum" in schema else [schema["const"]]
    texts = [each for each in permitted if isinstance(each, str) and each == schema.get("const", each)]
    if not texts or any(each in text for text in texts for each in (tag, end)):
        raise InvalidArgument(f"{path}.enum", "cannot be written in the model's format of calls")
    return [f"{rule}: " + " | ".join(json.dumps(text + after, ensure_ascii=False) for text in texts)]


def _text_line(rule: str, after: str, tag: str, end: str) -> str:
    """Any text and the text after it. The text contains neither the tag nor the end of the call."""
    stop = after[: after.index(tag) + len(tag)]
    rest = after[len(stop) :]
    no_tag = f"~/{ANY}*{pattern_of(tag)}{ANY}+/"
    no_end = f"~/{ANY}*{pattern_of(end)}{ANY}*/"
    value = f"/{ANY}*{pattern_of(stop)}/ & {no_tag} & {no_end}"
    if not rest:
        return f"{rule}[lazy]: {value}"
    return f"{rule}: {rule}_value {json.dumps(rest)}\n{rule}_value[lazy]: {value}"


def _types(schema: object) -> list[Any]:
    kind = cast(dict[str, Any], schema).get("type") if isinstance(schema, dict) else None
    return cast(list[Any], kind) if isinstance(kind, list) else [kind]


def _tagless(schema: object, path: str) -> dict[str, Any]:
    """The schema, restricted to values without an end tag. Raises InvalidArgument where that cannot be expressed."""
    if not isinstance(schema, dict) or not any(name in schema for name in TYPING):
        raise InvalidArgument(path, "needs a type in the model's format of calls")
    found = dict(cast(dict[str, Any], schema))
    if "enum" in found or "const" in found:
        if "</" in json.dumps([found.get("enum"), found.get("const")], ensure_ascii=False):
            raise InvalidArgument(path, "contains an end tag of the model's format of calls")
        return found
    if not str(found.get("$ref", "#/$defs/")).startswith(tuple(f"#/{each}/" for each in DEFINITIONS)):
        raise InvalidArgument(f"{path}.$ref", "must refer to $defs in the model's format of calls")
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(found.get(name), list):
            found[name] = [_tagless(each, f"{path}.{name}[{i}]") for i, each in enumerate(found[name])]
    types = _types(found)
    if "string" in types:
        if "pattern" in found:
            found["allOf"] = [*found.get("allOf", []), {"type": "string", "pattern": NO_TAG}]
        else:
            found["pattern"] = NO_TAG
    if "array" in types:
        found["items"] = (
            found["items"] if found.get("items") is False else _tagless(found.get("items"), f"{path}.items")
        )
    if "object" in types:
        found |= _tagless_members(found, path)
    return found


def _tagless_members(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The keywords of an object whose names and values have no end tag."""
    properties = cast(dict[str, Any], schema.get("properties") or {})
    additional: Any = schema.get("additionalProperties", False if properties else None)
    if "patternProperties" in schema or not (additional is False or isinstance(additional, dict)):
        raise InvalidArgument(path, "needs properties, and additionalProperties: false, in the model's format of calls")
    if "</" in "".join(properties):
        raise InvalidArgument(path, "contains an end tag of the model's format of calls")
    found: dict[str, Any] = {"additionalProperties": False}
    found["properties"] = {name: _tagless(each, f"{path}.properties.{name}") for name, each in properties.items()}
    if isinstance(additional, dict):
        value = _tagless(cast(object, additional), f"{path}.additionalProperties")
        found["patternProperties"] = {NO_TAG: value}
    return found

"""The field `response_format`: constraints on the text of answers."""

import json
from typing import Any, cast

from gateway.errors import HttpProblem
from longleaf.types import JSON_OBJECT, Constraint, json_schema

FIELD = "response_format"
SCHEMA = f"{FIELD}.json_schema.schema"
DEFINITION = f"{FIELD}.definition"
NAMES = {
    "constraint": FIELD,
    "constraint.json_object": FIELD,
    "constraint.json_schema": SCHEMA,
    "constraint.regex": DEFINITION,
    "constraint.lark": DEFINITION,
}
"""HTTP names of the service's fields."""
KNOWN = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "grammar": {"type", "syntax", "definition"},
}
"""The fields of each type of format."""
SCHEMA_FIELDS = {"name", "description", "schema", "strict"}


def constraint_of(given: dict[str, Any] | None) -> Constraint | None:
    """The constraint that a format describes; None for text. `strict` has no effect: schemas are always enforced.

    Raises HttpProblem that names the field.
    """
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in KNOWN:
        raise _problem(f"{FIELD}.type", f"must be one of {', '.join(KNOWN)}")
    _check_fields(given, KNOWN[kind], FIELD)
    match kind:
        case "json_object":
            return JSON_OBJECT
        case "json_schema":
            described = given.get("json_schema")
            if not isinstance(described, dict):
                raise _problem(f"{FIELD}.json_schema", "is not an object")
            fields = cast(dict[str, Any], described)
            _check_fields(fields, SCHEMA_FIELDS, f"{FIELD}.json_schema")
            if not isinstance(fields.get("schema"), dict):
                raise _problem(SCHEMA, "is not an object")
            return json_schema(json.dumps(fields["schema"]))
        case "grammar":
            syntax, definition = given.get("syntax"), given.get("definition")
            if syntax not in ("regex", "lark"):
                raise _problem(f"{FIELD}.syntax", "must be regex or lark")
            if not isinstance(definition, str) or not definition:
                raise _problem(DEFINITION, "is not a text")
            return Constraint(syntax, definition)
        case _:
            return None


def _check_fields(given: dict[str, Any], known: set[str], path: str) -> None:
    for name in given.keys() - known:
        if given[name] is not None:
            raise _problem(f"{path}.{name[:100]}", "is not supported", "unknown_parameter")


def _problem(field: str, reason: str, code: str = "invalid_value") -> HttpProblem:
    return HttpProblem(400, f"{field}: {reason}", param=field, code=code)

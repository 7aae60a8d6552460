# pyright: reportMissingTypeStubs=false
"""Constraints of requests as grammars in llguidance's dialect of Lark."""

import json
import re
from typing import Any, NoReturn, cast

from llguidance import regex_to_lark

from longleaf.errors import InvalidArgument
from longleaf.grammars.lark import check_options, json_rule
from longleaf.grammars.matcher import OPTIONS
from longleaf.types import Constraint

_OPTION_LINE = re.compile(r"^\s*%llguidance\b", re.MULTILINE)


def grammar_of(constraint: Constraint) -> str:
    """The grammar of a constraint. It is not compiled: llguidance may refuse it. Raises InvalidArgument naming the
    field of the request."""
    constraint.check()
    match constraint.kind:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            return _json_grammar(_schema(constraint))
        case "regex":
            return f"start: /{regex_to_lark(constraint.text, 'd')}/{OPTIONS}"
        case "lark":
            if _OPTION_LINE.search(constraint.text):
                raise InvalidArgument(constraint.field, "%llguidance is not supported: the service sets the options")
            return constraint.text + OPTIONS


def _json_grammar(schema: dict[str, Any]) -> str:
    return f"start: {json_rule(schema)}{OPTIONS}"


def _schema(constraint: Constraint) -> dict[str, Any]:
    try:
        found = json.loads(constraint.text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgument(constraint.field, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(constraint.field, f"is not valid JSON: {error}") from None
    if found is True:
        return {}
    if not isinstance(found, dict):
        raise InvalidArgument(constraint.field, "is neither an object nor true")
    schema = cast(dict[str, Any], found)
    check_options(schema, constraint.field)
    return schema


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

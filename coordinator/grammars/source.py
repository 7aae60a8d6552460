# pyright: reportMissingTypeStubs=false
"""Constraints of requests as grammars in llguidance's dialect of Lark."""

import json
import re
from typing import Any, NoReturn, cast

from llguidance import regex_to_lark

from longleaf.errors import InvalidArgument
from longleaf.grammars.matcher import OPTIONS
from longleaf.types import Constraint

ENGINE_OPTIONS = "x-guidance"
"""The keyword of a schema that holds options of llguidance."""
MAX_INDENT = 32
"""Characters of an indentation."""
WHITESPACE = rf"(\x20|\x0D?\x0A[\x20\x09]{{0,{MAX_INDENT}}})"
"""The white space that printers of JSON write between two tokens: a space, or a line break and an indentation. With
unlimited white space, a model may write nothing else up to the limit of its answer."""
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
    schema = {**schema, ENGINE_OPTIONS: {"whitespace_pattern": WHITESPACE}}
    return f"start: %json {json.dumps(schema)}{OPTIONS}"


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
    if ENGINE_OPTIONS in schema:
        raise InvalidArgument(constraint.field, f"{ENGINE_OPTIONS} is not supported: the service sets the options")
    return schema


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

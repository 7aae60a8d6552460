"""Constraints on the text of answers."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from longleaf.errors import InvalidArgument

ConstraintKind = Literal["json_schema", "json_object", "regex", "lark"]
MAX_CONSTRAINT_BYTES = 1 << 20


class Constraint(msgspec.Struct, frozen=True):
    """A constraint on the whole text of an answer. Only tokens are chosen with which the text can still satisfy it, and
    the answer ends once it does and cannot continue."""

    kind: ConstraintKind
    text: str = ""
    """The schema, the regular expression or the grammar; empty for `json_object`."""

    @property
    def field(self) -> str:
        """The path of the constraint in a request."""
        return f"constraint.{self.kind}"

    def check(self) -> None:
        """Raises InvalidArgument for a text that is missing or exceeds the limit."""
        size = len(self.text.encode(errors="surrogatepass"))
        if self.kind != "json_object" and not self.text.strip():
            raise InvalidArgument(self.field, "is empty")
        if size > MAX_CONSTRAINT_BYTES:
            raise InvalidArgument(self.field, f"has {size:,} bytes; the limit is {MAX_CONSTRAINT_BYTES:,}")


JSON_OBJECT = Constraint("json_object")
"""Any JSON object."""


def json_schema(schema: str | Mapping[str, Any]) -> Constraint:
    """JSON that a JSON Schema accepts. `schema` is the schema or its text."""
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def regex(pattern: str) -> Constraint:
    """Text that a regular expression matches as a whole."""
    return Constraint("regex", pattern)


def lark(grammar: str) -> Constraint:
    """Text that a Lark grammar derives from its rule `start`."""
    return Constraint("lark", grammar)

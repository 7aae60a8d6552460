"""Messages between the service and the process that compiles grammars: one JSON object per line."""

import msgspec

from longleaf.types import Constraint


class CompileRequest(msgspec.Struct, frozen=True):
    """A constraint to compile."""

    number: int
    constraint: Constraint


class CompileResult(msgspec.Struct, frozen=True):
    """The grammar of a constraint, or the reason why it is refused. Number 0 is the vocabulary's."""

    number: int
    grammar: str = ""
    refusal: str = ""
    """Empty if the constraint was compiled."""

"""Constraints of requests as grammars: the refusals that need no compilation, and the cache."""

import json

import pytest

from coordinator.grammars.compiler import GrammarCache
from coordinator.grammars.messages import CompileResult
from coordinator.grammars.source import grammar_of
from longleaf.errors import InvalidArgument
from longleaf.types import JSON_OBJECT, MAX_CONSTRAINT_BYTES, Constraint, json_schema, lark, regex


@pytest.mark.parametrize(
    ("constraint", "field", "reason"),
    [
        (json_schema(""), "json_schema", "is empty"),
        (json_schema('{"type":'), "json_schema", "is not valid JSON: Expecting value"),
        (json_schema("[]"), "json_schema", "is neither an object nor true"),
        (json_schema("false"), "json_schema", "is neither an object nor true"),
        (json_schema('{"maximum": Infinity}'), "json_schema", "Infinity is not JSON"),
        (json_schema({"x-guidance": {"lenient": True}}), "json_schema", "x-guidance is not supported"),
        (json_schema("[" * 100_000), "json_schema", "is nested too deeply"),
        (regex(" "), "regex", "is empty"),
        (lark(""), "lark", "is empty"),
        (lark('  %llguidance {"no_forcing": false}\nstart: "a"'), "lark", "%llguidance is not supported"),
        (Constraint("lark", "a" * (MAX_CONSTRAINT_BYTES + 1)), "lark", "has 1,048,577 bytes; the limit is 1,048,576"),
    ],
)
def test_refusals_name_the_field(constraint: Constraint, field: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason.replace("%", ".")) as caught:
        grammar_of(constraint)
    assert caught.value.field == f"constraint.{field}"


def test_text_of_a_constraint_cannot_leave_its_place() -> None:
    """A line break in a pattern or a schema begins no statement of the grammar."""
    assert grammar_of(regex("a\n%ignore /x/")).count("\n") == grammar_of(regex("a")).count("\n")
    schema = {"const": 'a"}\nstart: /x/'}
    found = grammar_of(json_schema(json.dumps(schema)))
    assert found.count("\n") == grammar_of(JSON_OBJECT).count("\n")


def test_true_is_the_schema_of_any_json() -> None:
    assert grammar_of(json_schema("true")) == grammar_of(json_schema("{}"))


def test_cache_is_separate_for_each_tenant_and_bounded() -> None:
    cache = GrammarCache(max_bytes=3000, max_tenants=2)
    for number in range(4):
        cache.put("a", bytes([number]), CompileResult(number, "g" * 500))
    assert [cache.get("a", bytes([number])) is not None for number in range(4)] == [False, True, True, True]
    assert cache.get("b", b"\3") is None
    cache.put("a", b"large", CompileResult(9, "g" * 5000))
    assert cache.get("a", b"\3") is None
    assert cache.get("a", b"large") is not None
    cache.put("b", b"x", CompileResult(10))
    cache.put("c", b"x", CompileResult(11))
    assert cache.get("a", b"large") is None

"""The process that compiles grammars: results, refusals, limits, and isolation of hostile constraints."""

import asyncio
import os
import signal
from contextlib import suppress

import psutil
import pytest

from coordinator.grammars.compiler import GrammarCompiler
from coordinator.grammars.source import grammar_of
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.grammars.matcher import MAX_REASON
from longleaf.types import JSON_OBJECT, json_schema, lark, regex
from tests.support.service import write_model

SMALL = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture
async def compiler(tmp_path):
    found = GrammarCompiler(write_model(tmp_path / "model"))
    yield found
    await found.close()


async def refusal(compiler, constraint, tenant="other"):
    with pytest.raises(InvalidArgument) as caught:
        await compiler.compile(tenant, constraint)
    assert caught.value.field == constraint.field
    return caught.value.description


async def test_grammars_are_compiled_once_for_each_tenant(compiler):
    for constraint in (SMALL, JSON_OBJECT, regex(r"[a-z]{1,20}\d?"), lark('start: "yes" | "no"')):
        assert await compiler.compile("a", constraint) == grammar_of(constraint)
    assert await asyncio.gather(*(compiler.compile("a", SMALL) for _ in range(5))) == [grammar_of(SMALL)] * 5
    assert compiler.num_compiled == 4
    await compiler.compile("b", SMALL)
    assert compiler.num_compiled == 5


async def test_unsupported_constraints_are_refused_by_name(compiler):
    cases = {
        "not": json_schema({"not": {"type": "string"}}),
        "uniqueItems": json_schema({"type": "array", "uniqueItems": True}),
        "Unknown format: uri-reference": json_schema({"type": "string", "format": "uri-reference"}),
        "Invalid type: text": json_schema({"type": "text"}),
        "definitions/x": json_schema({"$ref": "#/definitions/x"}),
        "Unsatisfiable": json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        "look-around": regex("(?=a)b"),
        "unclosed group": regex("(a"),
        "unknown name": lark("start: missing"),
        "unknown special token": lark("start: <|sure|>"),
    }
    for words, constraint in cases.items():
        assert words in await refusal(compiler, constraint)
    numbered = compiler.num_compiled
    await refusal(compiler, cases["not"])
    assert compiler.num_compiled == numbered, "refusals are cached"


def nested(depth):
    return '{"type":"array","items":' * depth + '{"type":"integer"}' + "}" * depth


def hostile(kind):
    words = [f"value{i}" for i in range(60_000)]
    rules = "".join(f'r{i}: "a" r{i}?\n' for i in range(3000))
    match kind:
        case "deep":
            return json_schema(nested(800))
        case "deeper":
            return json_schema(nested(30_000))
        case "product":
            return json_schema(
                {"allOf": [{"anyOf": [{"required": [f"p{i}"]}, {"required": [f"q{i}"]}]} for i in range(20)]}
            )
        case "multiple":
            return json_schema({"type": "integer", "multipleOf": 999_999_937})
        case "enum":
            return json_schema({"enum": words})
        case "alternatives":
            return regex("|".join(words))
        case "letters":
            return regex("|".join("abcdefghij"[i % 10] for i in range(500_000)))
        case "properties":
            return json_schema({"properties": {f"k{i}": {"type": ["integer", "string"]} for i in range(14_000)}})
        case "conjunction":
            patterns = [f"[a-z]*{letter}[a-z]*" for letter in "abcdefghijklmnop"]
            return json_schema({"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]})
        case "groups":
            return regex("(" * 20_000 + "a" + ")" * 20_000)
        case _:
            return lark("start: " + " | ".join(f"r{i}" for i in range(3000)) + "\n" + rules)


QUICK = ("deep", "deeper", "product", "multiple", "enum")
LONG = ("alternatives", "letters", "properties", "conjunction", "groups", "ambiguous")


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(LONG, marks=pytest.mark.extended)])
async def test_hostile_constraints_are_refused_and_delay_no_other_tenant(compiler, kinds):
    await compiler.compile("b", SMALL)  # the process has started
    attacks = asyncio.gather(*(refusal(compiler, hostile(kind)) for kind in kinds))
    for number in range(3):
        constraint = json_schema({"const": number})
        assert await compiler.compile("b", constraint) == grammar_of(constraint)
    assert not attacks.done(), "the attacks are compiled one after the other, beside the constraints of others"
    reasons = await attacks
    assert all(len(reason) <= MAX_REASON + 100 for reason in reasons)


async def test_catastrophic_patterns_stay_within_the_limits(compiler):
    """They compile lazily, so that they are accepted; ranks bound the work for each mask."""
    for pattern in ("(a?){1000}a{1000}", "((a+)+)+b", "(a|b)*a(a|b){25}", "(((a{100}){100}){100}){100}"):
        await compiler.compile("a", regex(pattern))


async def test_process_is_started_again_after_its_death(compiler):
    await compiler.compile("a", SMALL)
    process = compiler._process
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    with suppress(Unavailable):  # where the death is noticed by this call
        await compiler.compile("a", JSON_OBJECT)
    assert await compiler.compile("a", JSON_OBJECT) == grammar_of(JSON_OBJECT)


async def test_close_ends_the_process(tmp_path):
    compiler = GrammarCompiler(write_model(tmp_path / "model"))
    await compiler.compile("a", SMALL)
    process = psutil.Process(compiler._process.pid)
    await compiler.close()
    assert not process.is_running()
    with pytest.raises(Unavailable, match="stopping"):
        await compiler.compile("a", JSON_OBJECT)


async def test_missing_tokenizer_refuses_constraints(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    compiler = GrammarCompiler(folder)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="constraint: is not supported: .*cannot be read"):
            await compiler.compile("a", SMALL)
    await compiler.close()

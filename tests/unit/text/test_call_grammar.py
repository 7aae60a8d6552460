"""Grammars of tool calls: the parser finds valid calls in each text that a grammar accepts, in every format."""

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from coordinator.text.answer_formats import (
    CALL_FORMATS,
    CHANNEL_FORMATS,
    REASONING_FORMATS,
    AnswerFormat,
    tool_parameters,
)
from coordinator.text.answer_parser import ReasoningPiece, TextPiece, answer_parser
from coordinator.text.call_grammar import CallTerms, call_grammar
from coordinator.text.tool_calls import Call
from longleaf.errors import InvalidArgument
from longleaf.grammars.matcher import OPTIONS, GrammarMatcher
from longleaf.grammars.vocabulary import make_vocabulary

THINK = REASONING_FORMATS[0]
FORMATS = {each.name: AnswerFormat(THINK, each) for each in CALL_FORMATS}
FORMATS |= {each.name: AnswerFormat(channels=each) for each in CHANNEL_FORMATS}
SPECIAL_FORMATS = ("harmony", "mistral", "mistral_named", "deepseek", "llama3_json")
"""Formats whose markers are tried as special tokens."""
CASES = [(name, False) for name in FORMATS if name != "harmony"] + [(name, True) for name in SPECIAL_FORMATS]
BYTES = [*b'ab1-. \n"\\{}[],:;<>/=_|`', *range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)]


def function(name: str, properties: dict[str, Any], *, strict: bool = True, **more: Any) -> dict[str, Any]:
    required = more.pop("required", [*properties])
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters | more, "strict": strict}}


TOOLS = [
    function("f", {"a": {"type": "string"}, "b": {"type": "integer", "minimum": 0, "maximum": 99}}),
    function("a.b-c", {"mode": {"type": "string", "enum": ["ab", "b b"]}, "on": {"type": "boolean"}}, required=["on"]),
    function(
        "deep",
        {
            "list": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 2},
            "item": {"$ref": "#/$defs/item"},
        },
        **{
            "$defs": {
                "item": {
                    "type": "object",
                    "properties": {"x": {"anyOf": [{"type": "string", "pattern": "^[ab<]*$"}, {"type": "null"}]}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            }
        },
    ),
    {"type": "function", "function": {"name": "none"}},
]


class Alphabet:
    """Tokens of one byte, and the markers of a format: tokens with text, or special tokens."""

    def __init__(self, form: AnswerFormat, *, is_special: bool) -> None:
        markers = list(dict.fromkeys(form.markers))
        tokens = [bytes([each]) for each in dict.fromkeys(BYTES)]
        tokens += [each.encode() for text in ("▁tool call begin", "｜") for each in text]
        self.texts = [token.decode(errors="replace") for token in tokens] + markers
        self.special = {each: len(tokens) + i for i, each in enumerate(markers)} if is_special else {}
        with_text = [b"" if is_special else each.encode() for each in markers]
        self.end = len(self.texts)
        self.texts.append("")
        self.vocabulary = make_vocabulary([*tokens, *with_text, b""], [*self.special.values(), self.end])

    def ids_of(self, text: str) -> list[int]:
        """Tokens of one byte, and special tokens."""
        found, at = list[int](), 0
        while at < len(text):
            marker = next((each for each in self.special if text.startswith(each, at)), text[at])
            found.append(self.special[marker] if marker in self.special else self.texts.index(marker))
            at += len(marker)
        return found


def matcher_of(form: AnswerFormat, alphabet: Alphabet, **terms: Any) -> GrammarMatcher:
    text = call_grammar(form, alphabet.special, frozenset([alphabet.end]), CallTerms(tools=TOOLS, **terms))
    found = GrammarMatcher(alphabet.vocabulary, text + OPTIONS, [alphabet.end])
    assert not found.error, (found.error, text)
    return found


def walk(matcher: GrammarMatcher, alphabet: Alphabet, rng: random.Random, most: int = 600) -> str | None:
    """A random text of the grammar; None if it is longer than `most` tokens. Tokens that end something are likelier."""
    text = ""
    for _ in range(most):
        [allowed] = matcher.allowed(alphabet.end + 1).nonzero()
        assert not matcher.error, (matcher.error, text)
        weights = [20 if len(alphabet.texts[i]) != 1 else 8 if alphabet.texts[i] in '"}]' else 1 for i in allowed]
        [token_id] = rng.choices([*map(int, allowed)], weights)
        matcher.accept(token_id)
        text += alphabet.texts[token_id]
        if matcher.has_ended:
            return text
    return None


def parsed(form: AnswerFormat, text: str, *, is_reasoning: bool = False) -> tuple[list[Call], str, str]:
    parser = answer_parser(form, tool_parameters(TOOLS), is_reasoning=is_reasoning)
    assert parser is not None
    pieces = [*parser.push(text), *parser.finish()]
    calls = [each for each in pieces if isinstance(each, Call)]
    written = "".join(each.text for each in pieces if isinstance(each, TextPiece))
    return calls, written, "".join(each.text for each in pieces if isinstance(each, ReasoningPiece))


def check(calls: Sequence[Call]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize(("name", "is_special"), CASES)
@pytest.mark.parametrize("is_reasoning", [False, True])
def test_required_calls_are_found_and_valid(name: str, is_special: bool, is_reasoning: bool) -> None:
    form = FORMATS[name]
    alphabet, num_found = Alphabet(form, is_special=is_special), 0
    is_reasoning = is_reasoning and form.reasoning is not None
    starts = [
        matcher_of(form, alphabet, is_required=True, is_single=is_single, is_reasoning=is_reasoning)
        for is_single in (False, True)
    ]
    for seed in range(30):
        is_single = seed % 2 == 1
        if (text := walk(starts[is_single].copy([alphabet.end]), alphabet, random.Random(seed))) is None:
            continue
        calls, written, _ = parsed(form, text, is_reasoning=is_reasoning)
        assert calls and (form.channels or not written.strip()), (text, calls, written)
        assert len(calls) == 1 or not is_single
        check(calls)
        num_found += 1
    assert num_found >= 10


@pytest.mark.parametrize(("name", "is_special"), CASES)
def test_free_answers_are_text_or_valid_calls(name: str, is_special: bool) -> None:
    form = FORMATS[name]
    alphabet, num_calls = Alphabet(form, is_special=is_special), 0
    start = matcher_of(form, alphabet)
    for seed in range(40):
        if (text := walk(start.copy([alphabet.end]), alphabet, random.Random(seed))) is None:
            continue
        calls, written, reasoning = parsed(form, text)
        check(calls)
        num_calls += len(calls)
        starts = ["to=functions."] if form.calls is None else [form.calls.start, *form.calls.frame[:1]]
        assert not any(each in written for each in starts), (text, written, reasoning)
    assert num_calls >= 5


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"type": "object", "patternProperties": {}}, ".patternProperties"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, ".properties.a.pattern"),
        ({"type": "object", "properties": {"a": {}}}, ".properties.a"),
        ({"type": "object", "properties": {"a<": {"type": "integer"}}}, ".properties.a<"),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, ".properties.a.items"),
        ({"type": "object", "properties": {"a": {"type": "object"}}}, ".properties.a"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, ".properties.a.$ref"),
        ({"type": "object", "properties": {"a": {"enum": ["</arg_value>"]}}}, ".properties.a"),
        ({"type": "object", "required": ["a"]}, ".required"),
        ({"type": "array"}, ".type"),
    ],
)
def test_schemas_that_tags_cannot_hold_are_refused_by_path(name: str, parameters: dict[str, Any], path: str) -> None:
    tools = [TOOLS[0], {"type": "function", "function": {"name": "x", "parameters": parameters}}]
    with pytest.raises(InvalidArgument) as caught:
        call_grammar(FORMATS[name], {}, frozenset(), CallTerms(tools=tools))
    assert caught.value.field == f"tools[1].function.parameters{path}"


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_of_loose_tools_are_any_object(name: str) -> None:
    form = FORMATS[name]
    alphabet = Alphabet(form, is_special=name == "harmony")
    start = matcher_of(form, alphabet, is_required=True, is_single=True, loose=frozenset(range(len(TOOLS))))
    found = [walk(start.copy([alphabet.end]), alphabet, random.Random(seed)) for seed in range(12)]
    texts = [text for text in found if text is not None]
    assert texts and all(len(parsed(form, text)[0]) == 1 for text in texts)


def test_formats_that_cannot_be_constrained_are_refused() -> None:
    terms = CallTerms(tools=TOOLS)
    for form, special, ends in (
        (AnswerFormat(), {}, frozenset[int]()),
        (FORMATS["harmony"], {}, frozenset[int]()),
        (FORMATS["hermes"], {"</tool_call>": 3}, frozenset([3])),
    ):
        with pytest.raises(InvalidArgument, match="calls cannot be constrained") as caught:
            call_grammar(form, special, ends, terms)
        assert caught.value.field == "tools"


def test_harmony_call_ends_the_answer_where_its_marker_is_an_end_token() -> None:
    form = FORMATS["harmony"]
    alphabet = Alphabet(form, is_special=True)
    ends = frozenset([alphabet.special["<|call|>"]])
    text = call_grammar(form, alphabet.special, ends, CallTerms(tools=TOOLS, is_required=True))
    matcher = GrammarMatcher(alphabet.vocabulary, text + OPTIONS, ends)
    written = "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    for token_id in alphabet.ids_of(written + '<|constrain|>json<|message|>{"a": "", "b": 1}'):
        assert matcher.allowed(alphabet.end + 1)[token_id] and not matcher.has_ended
        matcher.accept(token_id)
    assert matcher.has_ended and not matcher.error


def test_numbers_beyond_the_range_of_floats_are_valid_arguments() -> None:
    form = FORMATS["hermes"]
    call = '<tool_call>{"name": "f", "arguments": {"a": "", "b": %s}}</tool_call>'
    for number in ("1e999", "-1e999", "9" * 5000):
        [found], _, _ = parsed(form, call % number)
        assert abs(json.loads(found.arguments)["b"]) > 1e300

"""The split of an answer into text, reasoning and calls does not depend on the pieces in which it arrives."""

import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.answer_formats import CALL_FORMATS, CHANNEL_FORMATS, REASONING_FORMATS, AnswerFormat
from coordinator.text.answer_parser import MAX_SPACE, Piece, ReasoningPiece, TextPiece, answer_parser
from coordinator.text.tool_calls import Call

TOOLS = {"get_weather": frozenset({"city"}), "add": frozenset[str]()}
THINK = REASONING_FORMATS[0]
FORMATS = {each.name: AnswerFormat(THINK, each) for each in CALL_FORMATS} | {
    each.name: AnswerFormat(channels=each) for each in CHANNEL_FORMATS
}
WEATHER = '{"city": "Köln </tool_call> \\" {"}'
EXAMPLES = {
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
    "qwen3_coder": (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\na "b\n</parameter>\n<parameter=n>\n2\n</parameter>\n'
        "</function>\n</tool_call>"
    ),
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
    "mistral_named": f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}",
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}]',
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{WEATHER}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "llama3_json": f'{{"name": "get_weather", "parameters": {WEATHER}}}',
    "harmony": ("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + WEATHER + "<|call|>"),
}
ARGUMENTS = {"glm": {"city": "12"}, "qwen3_coder": {"city": 'a "b', "n": 2}}


def split(name: str, pieces: Sequence[str], *, is_reasoning: bool = False) -> list[Piece]:
    parser = answer_parser(FORMATS[name], TOOLS, is_reasoning=is_reasoning)
    assert parser is not None
    found = [piece for text in pieces for piece in parser.push(text)]
    return merged([*found, *parser.finish()])


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins adjacent texts of one kind."""
    found = list[Piece]()
    for piece in pieces:
        match found[-1:], piece:
            case [TextPiece(before)], TextPiece(text):
                found[-1] = TextPiece(before + text)
            case [ReasoningPiece(before)], ReasoningPiece(text):
                found[-1] = ReasoningPiece(before + text)
            case _:
                found.append(piece)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_example_of_each_format_is_a_call(name: str) -> None:
    expected = Call("get_weather", json.dumps(ARGUMENTS.get(name, json.loads(WEATHER)), ensure_ascii=False))
    for size in (1, 2, 3, 7, 1000):
        text = EXAMPLES[name]
        assert split(name, [text[i : i + size] for i in range(0, len(text), size)]) == [expected]


MARKERS = sorted({marker for form in FORMATS.values() for marker in form.markers})
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *MARKERS,
            *EXAMPLES.values(),
            *'"\\{}[];\n <',
            "get_weather",
            "analysis",
            "commentary to=functions.add ",
            "<function=add>",
            '{"name": "add", "arguments": {}}',
            " " * (MAX_SPACE + 1),
            "x" * 600,
        ]
    )
    | st.sampled_from(MARKERS).map(lambda marker: marker[:-2])
    | st.text(max_size=3),
    max_size=9,
).map("".join)


@given(st.data(), st.sampled_from(sorted(FORMATS)), FRAGMENTS, st.booleans())
def test_any_split_gives_the_same_result(data: st.DataObject, name: str, text: str, is_reasoning: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = split(name, [text], is_reasoning=is_reasoning)
    assert split(name, pieces, is_reasoning=is_reasoning) == whole == split(name, text, is_reasoning=is_reasoning)
    for call in whole:
        if isinstance(call, Call):
            assert call.name in TOOLS and isinstance(json.loads(call.arguments), dict)


@given(st.sampled_from(sorted(FORMATS)), st.text())
def test_text_without_markers_is_unchanged(name: str, text: str) -> None:
    if not text.lstrip().startswith(("{", "<")) and not any(marker in text for marker in MARKERS):
        assert "".join(piece.text for piece in split(name, [text]) if isinstance(piece, TextPiece)) == text


def test_reasoning_precedes_the_answer() -> None:
    call = Call("add", "{}")
    text = "<think>\nAdd <tool_call> it.\n</think>\n\nI add.\n" + '<tool_call>{"name": "add"}</tool_call>\n'
    expected = [ReasoningPiece("Add <tool_call> it."), TextPiece("I add."), call]
    assert split("hermes", [text]) == expected
    assert split("hermes", [text.removeprefix("<think>")], is_reasoning=True) == expected
    assert split("hermes", ["Say <think> twice</think>"]) == [TextPiece("Say <think> twice</think>")]
    assert split("hermes", ["<think><think>a</think>b"]) == [ReasoningPiece("<think>a"), TextPiece("b")]


def test_channels_are_split() -> None:
    text = (
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.add json<|message|>{"a": 1}'
    )
    assert split("harmony", [text]) == [
        ReasoningPiece("They ask."),
        TextPiece("I look."),
        Call("add", '{"a": 1}'),
    ]
    assert split("harmony", ["<|channel|>final<|message|>4"]) == [TextPiece("4")]
    assert split("harmony", ["Four."]) == [TextPiece("Four.")]


def test_several_calls_are_separate() -> None:
    calls = [Call("add", '{"a": 1}'), Call("add", '{"a": 2}')]
    one, two = (f'{{"name": "add", "parameters": {{"a": {i}}}}}' for i in (1, 2))
    assert split("llama3_json", [f"{one}; {two}"]) == calls
    assert split("llama3_json", [f"<|python_tag|>{one};{two}"]) == calls
    assert split("hermes", [f"<tool_call>{one}</tool_call>\n<tool_call>\n{two}\n</tool_call>"]) == calls
    assert split("mistral", [f"[TOOL_CALLS][{one}, {two}]"]) == calls
    assert split("mistral_named", ['[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}']) == calls


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "}}",
        '{"name": "other", "arguments": {}}',
        '{"name": 3}',
        "",
        "<tool_call>" * 1000,
    ],
)
def test_invalid_call_stays_text(body: str) -> None:
    for text in (f"a <tool_call>{body}</tool_call> b", f"a <tool_call>{body}"):
        assert split("hermes", [text]) == [TextPiece(text)]


def test_lone_surrogate_stays_escaped() -> None:
    assert split("hermes", ['<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>']) == [
        Call("add", '{"a": "\\ud800"}')
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("filler", ["\n", '"', "{", "<tool_call>"])
def test_time_is_linear_in_the_answer(name: str, filler: str) -> None:
    """A call that never closes, and text that may begin a marker, token by token."""

    def seconds(count: int) -> float:
        start = EXAMPLES[name][:60]
        begun = time.process_time()
        split(name, [start, *[filler] * count])
        return time.process_time() - begun

    seconds(100)
    assert min(seconds(8_000), seconds(8_000)) < 40 * max(seconds(800), 0.005)

"""Grammars of answers with tool calls, in llguidance's dialect of Lark.

A grammar is made from a format, which is data, and the schemas of the tools. In each text of the grammar, the parser of
the same format finds reasoning, text, and calls whose arguments satisfy the schemas.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from coordinator.text.answer_formats import (
    AnswerFormat,
    CallFormat,
    ChannelFormat,
    HeadedCalls,
    JsonCalls,
    ReasoningFormat,
    TaggedCalls,
)
from coordinator.text.tagged_arguments import tagged_arguments
from longleaf.errors import InvalidArgument
from longleaf.grammars.lark import ANY, WHITESPACE, check_options, json_rule, pattern_of

WHITE = r"[\s\x1c-\x1f]"
"""A character that Python counts as white space."""
TERMINALS = rf"""
SPACE: /[ \n]{{1,4}}/
WS: /{WHITESPACE}/
TEXT: /{ANY}+/
"""
"""Space around the parts of an answer, space in JSON, and any text without special tokens."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of the arguments of a function without parameters."""
UNKNOWN_FORMAT = "the format in which the model writes calls is unknown"


class CallTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that an answer may have."""

    tools: Sequence[Mapping[str, Any]]
    """The tools that may be called, in OpenAI's form. At least one."""
    is_required: bool = False
    """Whether the answer consists of calls, besides reasoning; otherwise text may precede or replace them."""
    is_single: bool = False
    """Whether there is at most one call."""
    is_reasoning: bool = False
    """Whether the prompt ends within the reasoning."""
    answer_schema: dict[str, Any] | None = None
    """The schema of an answer without calls; None: any text. Text cannot precede calls if it is given."""
    loose: frozenset[int] = frozenset()
    """The tools whose arguments are any object, by index."""


def parameters_field(index: int) -> str:
    """The path of the schema of a tool in a request."""
    return f"tools[{index}].function.parameters"


def check_format(form: AnswerFormat, special: Mapping[str, int], end_tokens: frozenset[int]) -> None:
    """Raises InvalidArgument naming `tools` if calls of a format cannot be constrained. `special` are the ids of the
    markers that are special tokens."""
    channels = form.channels
    if channels is None and form.calls is None:
        raise InvalidArgument("tools", f"calls cannot be constrained: {UNKNOWN_FORMAT}")
    may_end = () if channels is None else (channels.call_end,)
    for marker in form.markers:
        if special.get(marker) in end_tokens and marker not in may_end:
            raise InvalidArgument("tools", f"calls cannot be constrained: the marker {marker} ends an answer")
    for marker in () if channels is None else (channels.start, channels.content, *channels.ends):
        if marker not in special:
            raise InvalidArgument("tools", f"calls cannot be constrained: {marker} is no special token")


def call_grammar(form: AnswerFormat, special: Mapping[str, int], end_tokens: frozenset[int], terms: CallTerms) -> str:
    """The grammar of an answer. Raises as `check_format`, and InvalidArgument naming the field of a tool whose schema
    cannot be honoured."""
    check_format(form, special, end_tokens)
    notation = Notation(special)
    if form.channels is not None:
        return ChannelGrammar(form.channels, notation, end_tokens, terms).text
    assert form.calls is not None
    return MarkerGrammar(form.reasoning, form.calls, notation, terms).text


class Notation:
    """Texts in the notation of grammars."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None

    def is_special(self, marker: str) -> bool:
        """Whether a marker is a special token, which no text contains."""
        return marker in self._special

    def __call__(self, text: str) -> str:
        """The sequence of literals and special tokens that stands for a text with markers; empty for no text."""
        parts, at = list[str](), 0
        for found in self._split.finditer(text) if self._split is not None else ():
            parts += [text[at : found.start()], found[0]]
            at = found.end()
        return " ".join(self._part(part) for part in (*parts, text[at:]) if part)

    def _part(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text, ensure_ascii=False)


def excluding(beginnings: Iterable[str], texts: Iterable[str]) -> str:
    """The part of a terminal that excludes text which begins, after white space, with one of `beginnings`, or contains
    one of `texts`. One expression for all, because the work for masks grows with their product."""
    found = [f"{WHITE}*{pattern_of(each)}{ANY}*" for each in beginnings]
    found += [f"{ANY}*{pattern_of(each)}{ANY}*" for each in texts]
    return f" & ~/{'|'.join(found)}/" if found else ""


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


class ToolRules:
    """The rules of the arguments of each tool."""

    def __init__(self, terms: CallTerms) -> None:
        self.names = [tool["function"]["name"] for tool in terms.tools]
        self._schemas = [
            {"type": "object"} if i in terms.loose else arguments_schema(tool["function"].get("parameters"), i)
            for i, tool in enumerate(terms.tools)
        ]
        self._is_loose = [i in terms.loose for i in range(len(terms.tools))]

    def json_lines(self) -> list[str]:
        """The rules `arguments_0` and so on: the arguments in JSON."""
        return [f"arguments_{i}: {json_rule(schema)}" for i, schema in enumerate(self._schemas)]

    def tagged_lines(self, form: TaggedCalls, end: str) -> list[str]:
        """The rules `arguments_0` and so on: the arguments in tags."""
        lines = list[str]()
        for i, schema in enumerate(self._schemas):
            given = None if self._is_loose[i] else schema
            lines += tagged_arguments(f"arguments_{i}", form.written_pair, end, given, parameters_field(i))
        return lines

    def alternatives(self, write: Callable[[str, str], Iterable[str]]) -> str:
        """The alternatives that `write` returns for the name of each tool and the rule of its arguments."""
        return " | ".join(each for i, name in enumerate(self.names) for each in write(name, f"arguments_{i}"))


def arguments_schema(parameters: Mapping[str, Any] | None, index: int) -> dict[str, Any]:
    """The schema of the arguments of a tool. Raises InvalidArgument unless its type is object."""
    if not parameters:
        return NO_PARAMETERS
    field = parameters_field(index)
    check_options(dict(parameters), field)
    if parameters.get("type", "object") != "object":
        raise InvalidArgument(f"{field}.type", "must be object")
    return {**parameters, "type": "object"}


class MarkerGrammar:
    """The grammar of answers with markers around reasoning and calls."""

    def __init__(
        self, reasoning: ReasoningFormat | None, calls: CallFormat, notation: Notation, terms: CallTerms
    ) -> None:
        self._reasoning, self._calls, self._notation, self._terms = reasoning, calls, notation, terms
        self._tools = ToolRules(terms)
        lines = [*self._reasoning_lines(), *self._call_lines()]
        if terms.is_required:
            body, more = "required", [f"required: SPACE? ({self._group()}) SPACE?"]
        else:
            body, more = "optional", self._optional_lines()
        self.text = "\n".join([f"start: {joined(self._lead(), body)}", *more, *lines]) + TERMINALS

    def _lead(self) -> str:
        if self._reasoning is None:
            return ""
        return "thought" if self._terms.is_reasoning else "(thinking thought)?"

    def _reasoning_lines(self) -> list[str]:
        """The rules of the reasoning: its start marker, and its text with the end marker."""
        if self._reasoning is None:
            return []
        start, end = self._reasoning.start, self._reasoning.end
        lines = [
            f"thought: TEXT? {self._notation(end)}"
            if self._notation.is_special(end)
            else f"thought[lazy]: /{ANY}*{pattern_of(end)}/"
        ]
        if not self._terms.is_reasoning:
            is_special = self._notation.is_special(start)
            lines.append(
                f"thinking: SPACE? {self._notation(start)}"
                if is_special
                else f"thinking: /{WHITE}{{0,16}}{pattern_of(start)}/"
            )
        return lines

    def _call_lines(self) -> list[str]:
        """The rule `content`: a call without its markers, or the list of calls."""
        match body := self._calls.body:
            case JsonCalls():
                return [*self._json_lines(body), *self._tools.json_lines()]
            case HeadedCalls():
                content = self._tools.alternatives(
                    lambda name, arguments: [
                        joined(self._notation(before.format(name=name)), arguments, self._notation(after))
                        for before, after in body.written
                    ]
                )
                return [f"content: {content}", *self._tools.json_lines()]
            case TaggedCalls():
                before, after = body.written
                content = self._tools.alternatives(
                    lambda name, arguments: [
                        joined(self._notation(before.format(name=name)), arguments, self._notation(after))
                    ]
                )
                return [f"content: {content}", *self._tools.tagged_lines(body, self._calls.end)]

    def _json_lines(self, body: JsonCalls) -> list[str]:
        member = json.dumps(f'"{body.arguments[0]}":')

        def write(name: str, arguments: str) -> list[str]:
            return [f"{json.dumps(json.dumps(name) + ',')} WS? {member} WS? {arguments}"]

        found = f'"{{" WS? {json.dumps(json.dumps("name") + ":")} WS? ({self._tools.alternatives(write)}) WS? "}}"'
        if not body.is_list:
            return [f"content: {found}"]
        more = "" if self._terms.is_single else ' ("," WS? member)*'
        return [f'content: "[" WS? member{more} WS? "]"', f"member: {found}"]

    def _call(self) -> str:
        """A call with its start marker."""
        return joined(self._notation(self._calls.start), self._after_start())

    def _after_start(self) -> str:
        if not self._calls.end:
            return "SPACE? content"
        return joined("SPACE? content SPACE?", self._notation(self._calls.end))

    def _more(self, *, is_bare: bool = False) -> str:
        """The calls after the first one. `is_bare`: they need no start marker, because no text precedes them."""
        is_list = isinstance(self._calls.body, JsonCalls) and self._calls.body.is_list
        if self._terms.is_single or is_list:
            return ""
        return f'(SPACE? {self._call()} | ";" SPACE? content)*' if is_bare else f"(SPACE? {self._call()})*"

    def _after_frame(self) -> str:
        frame = "".join(self._calls.frame[1:])
        return joined("SPACE?", self._call(), self._more(), "SPACE?", self._notation(frame))

    def _group(self) -> str:
        """All calls, with the markers around them."""
        if self._calls.frame:
            return joined(self._notation(self._calls.frame[0]), self._after_frame())
        if self._calls.is_bare:
            return joined(f"({self._call()} | content)", self._more(is_bare=True))
        return joined(self._call(), self._more())

    def _optional_lines(self) -> list[str]:
        """The rules of an answer that is text, or calls after text. Text cannot contain a marker that begins a call."""
        calls, notation, schema = self._calls, self._notation, self._terms.answer_schema
        marker = calls.frame[0] if calls.frame else calls.start
        rest = self._after_frame() if calls.frame else joined(self._after_start(), self._more())
        if schema is not None:
            if calls.is_bare:
                raise InvalidArgument("tools", "cannot be strict together with a constraint: calls have no marker")
            return [f"optional: SPACE? (answer | {notation(marker)} {rest} SPACE?)", f"answer: {json_rule(schema)}"]
        beginnings = self._other_beginnings()
        texts = [each for each in sorted({marker, calls.start}) if not notation.is_special(each)]
        lines = [f"FREE: /{ANY}+/{excluding(beginnings, texts)}"]
        if notation.is_special(marker):
            answers = ["FREE?", f"FREE? {notation(marker)} {rest} SPACE?"]
        else:
            others = excluding(beginnings, [each for each in texts if each != marker])
            lines.append(f"lead[lazy]: /{ANY}*{pattern_of(marker)}/{others}")
            answers = ["FREE?", f"lead {rest} SPACE?"]
        if calls.is_bare:
            answers.append(joined("SPACE? content", self._more(is_bare=True), "SPACE?"))
        return [f"optional: {' | '.join(answers)}", *lines]

    def _other_beginnings(self) -> list[str]:
        """The beginnings of answers that are no text: reasoning, and calls without a marker."""
        reasoning, found = self._reasoning, ["{"] if self._calls.is_bare else list[str]()
        if reasoning is not None and not self._terms.is_reasoning and not self._notation.is_special(reasoning.start):
            found.append(reasoning.start)
        return found


class ChannelGrammar:
    """The grammar of answers of several messages. At most one of them is a call, which ends the answer."""

    def __init__(self, form: ChannelFormat, notation: Notation, end_tokens: frozenset[int], terms: CallTerms) -> None:
        tools = ToolRules(terms)
        before, after = form.written

        def header(channel: str) -> str:
            return notation(before.format(channel=channel))

        messages = [f"({header(channel)} TEXT? {notation(after)})?" for channel in form.channels]
        call_end = notation(form.call_end)
        is_end = call_end in {f"<[{each}]>" for each in end_tokens}
        calls = tools.alternatives(
            lambda name, arguments: [
                joined(notation(each.format(name=name)), arguments, "" if is_end else f"({call_end})?")
                for each in form.written_calls
            ]
        )
        lines = [f"start: {' '.join(messages)} {'call' if terms.is_required else '(call | last)'}", f"call: {calls}"]
        if not terms.is_required:
            schema = terms.answer_schema
            lines.append(f"last: {header(form.final)} {'TEXT?' if schema is None else 'answer'}")
            lines += [] if schema is None else [f"answer: {json_rule(schema)}"]
        self.text = "\n".join([*lines, *tools.json_lines()]) + TERMINALS

"""Splits an answer into text, reasoning and tool calls while it is generated.

The result depends only on the whole text, not on the pieces in which it arrives: text is withheld while it may be part
of a marker or of a call. The time is linear in the length of the answer. A call is reported once it is complete and
valid; otherwise its text, with the markers, is part of the answer's text.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from coordinator.text.answer_formats import (
    AnswerFormat,
    CallFormat,
    ChannelFormat,
    HeadedCalls,
    ReasoningFormat,
    TaggedCalls,
    ToolParameters,
)
from coordinator.text.tool_calls import Call, calls_of, json_call

MAX_HEADER = 512
"""Maximum characters of a header of a message, and before the arguments of a call."""
MAX_SPACE = 256
"""Maximum characters of white space that are withheld: before a call, or at the end of reasoning, they are dropped."""


class TextPiece(NamedTuple):
    """Text of the answer."""

    text: str


class ReasoningPiece(NamedTuple):
    """Text of the reasoning."""

    text: str


Piece = TextPiece | ReasoningPiece | Call


class AnswerParser(Protocol):
    """Splits one answer."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Adds text; returns the pieces that no later text can change."""
        ...

    def finish(self) -> list[Piece]:
        """The remaining pieces. No text may be added after this."""
        ...

    @property
    def is_decided(self) -> bool:
        """Whether no text is withheld."""
        ...


def answer_parser(form: AnswerFormat, tools: ToolParameters, *, is_reasoning: bool) -> AnswerParser | None:
    """A parser for one answer; None if the answer is only text. Without `tools`, calls are text. `is_reasoning`: the
    prompt ends within the reasoning."""
    if form.channels is not None:
        return ChannelParser(form.channels, tools)
    calls = form.calls if tools else None
    if form.reasoning is None and calls is None:
        return None
    return MarkerParser(form.reasoning, calls, tools, is_reasoning=is_reasoning)


def ends_in_reasoning(form: AnswerFormat, prompt_end: str) -> bool:
    """Whether a prompt with this end has begun the reasoning of the answer."""
    return form.reasoning is not None and prompt_end.rstrip().endswith(form.reasoning.start)


class MarkerParser:
    """Splits an answer with markers around reasoning and calls. Reasoning is at the beginning; calls within it are
    reasoning."""

    def __init__(
        self, reasoning: ReasoningFormat | None, calls: CallFormat | None, tools: ToolParameters, *, is_reasoning: bool
    ) -> None:
        self._reasoning, self._calls, self._tools = reasoning, calls, tools
        self._starts: tuple[str, ...] = () if calls is None else (calls.start, *calls.frame)
        self._find_start = _pattern(self._starts)
        self._state: Literal["begin", "reasoning", "between", "text", "call"] = "begin"
        """`between`: after reasoning or a call. In `begin` and `between`, white space is withheld."""
        self._pending: str = ""
        """Undecided text; short, except within one call of `push`."""
        self._lead: str = ""
        """Text that is dropped if a call follows, and is part of the answer's text otherwise."""
        self._body: list[str] = []
        """The text of a call."""
        self._end = CallEnd(calls) if calls is not None else None
        self._has_text = self._has_reasoning = self._has_calls = False
        self._output: list[Piece] = []
        if is_reasoning:
            self._state = "reasoning"

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_decided(self) -> bool:
        return not self._pending and not self._lead and self._state != "call"

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        while self._advance():
            pass
        return self._drain()

    def finish(self) -> list[Piece]:
        match self._state:
            case "reasoning":
                self._emit_reasoning(self._pending)
            case "call":
                self._finish_call("".join(self._body), "")
            case "text":
                self._emit_text(self._pending)
            case "begin" | "between":
                has_more = bool(self._pending.strip()) or bool(self._lead.strip() and not self._has_calls)
                if has_more or (self._state == "begin" and not self._has_reasoning):
                    self._emit_text(self._lead + self._pending)
        self._pending = self._lead = ""
        return self._drain()

    def _drain(self) -> list[Piece]:
        output, self._output = self._output, []
        return output

    def _advance(self) -> bool:
        """Decides a part of the pending text. Returns whether more may be decided."""
        if not self._pending:
            return False
        match self._state:
            case "begin" | "between":
                return self._begin()
            case "reasoning":
                return self._reason()
            case "text":
                return self._write()
            case "call":
                return self._collect()

    def _begin(self) -> bool:
        text = self._pending.lstrip()
        bare = text
        if self._calls is not None and self._calls.is_bare and self._has_calls:
            bare = text.lstrip("; \n\r\t")
        if len(self._pending) - len(bare) > MAX_SPACE:
            return self._continue_text(text)
        reasoning = self._reasoning if self._state == "begin" else None
        markers = (*self._starts, *(() if reasoning is None else (reasoning.start,)))
        if not bare or any(marker.startswith(text) for marker in markers if len(text) < len(marker)):
            return False
        if reasoning is not None and text.startswith(reasoning.start):
            self._pending, self._state = text[len(reasoning.start) :], "reasoning"
            return True
        if (start := next((each for each in self._starts if text.startswith(each)), None)) is not None:
            self._lead += self._pending[: len(self._pending) - len(text)]
            self._pending = text
            return self._open(start)
        if self._calls is not None and self._calls.is_bare and bare[0] == "{" and not self._has_text:
            self._lead += self._pending[: len(self._pending) - len(bare)]
            self._pending = bare
            return self._open("")
        return self._continue_text(text)

    def _continue_text(self, text: str) -> bool:
        """Continues with the answer's text. White space between reasoning and text is dropped."""
        is_first = self._has_reasoning and not self._has_text and not self._has_calls and not self._lead
        lead, self._lead, self._state = self._lead, "", "text"
        self._emit_text(lead)
        if is_first:
            self._pending = text
        return True

    def _open(self, marker: str) -> bool:
        """Enters a call, or the frame of a group of calls, whose marker begins the pending text."""
        assert self._calls is not None and self._end is not None
        self._lead += marker
        self._pending = self._pending[len(marker) :]
        self._state = "between" if marker in self._calls.frame else "call"
        self._end.reset()
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        before, end, after = self._pending.partition(self._reasoning.end)
        if end:
            self._emit_reasoning(before[: _num_stable(before)])
            self._pending, self._state = after, "between"
            self._has_reasoning = True
            return True
        num_open = num_withheld(self._pending, (self._reasoning.end,))
        shown = self._pending[: _num_stable(self._pending[: len(self._pending) - num_open])]
        self._emit_reasoning(shown)
        self._pending = self._pending[len(shown) :]
        return False

    def _write(self) -> bool:
        if self._find_start is None:
            self._emit_text(self._pending)
            self._pending = ""
            return False
        found = self._find_start.search(self._pending)
        if found is not None:
            text = self._pending[: found.start()]
            shown = text[: _num_stable(text)]
            self._emit_text(shown)
            self._lead = text[len(shown) :]
            self._pending = self._pending[found.start() :]
            return self._open(found[0])
        num_open = num_withheld(self._pending, self._starts)
        shown = self._pending[: _num_stable(self._pending[: len(self._pending) - num_open])]
        self._emit_text(shown)
        self._pending = self._pending[len(shown) :]
        return False

    def _collect(self) -> bool:
        assert self._end is not None
        end = self._end.push(self._pending)
        if end is None:
            self._body.append(self._pending)
            self._pending = ""
            return False
        body = "".join(self._body) + self._pending[:end]
        self._pending = self._pending[end:]
        marker = self._end.marker
        self._finish_call(body.removesuffix(marker), marker)
        return True

    def _finish_call(self, body: str, marker: str) -> None:
        assert self._calls is not None
        calls = calls_of(body, self._calls, self._tools)
        self._body = []
        lead, self._lead = self._lead, ""
        if calls is None:
            self._state = "text"
            self._emit_text(lead + body + marker)
            return
        self._output += calls
        self._has_calls, self._state = True, "between"

    def _emit_text(self, text: str) -> None:
        if text:
            self._has_text = True
            self._output.append(TextPiece(text))

    def _emit_reasoning(self, text: str) -> None:
        if not self._has_reasoning:
            text = text.lstrip()
        if text:
            self._has_reasoning = True
            self._output.append(ReasoningPiece(text))


class CallEnd:
    """Finds the end of a call: its end marker outside of JSON strings, or else the end of its JSON value."""

    def __init__(self, calls: CallFormat) -> None:
        self.marker = calls.end
        self._separator = calls.body.separator if isinstance(calls.body, HeadedCalls) else ""
        quote = () if isinstance(calls.body, TaggedCalls) else ('"',)
        self._outside = _required_pattern((*quote, self.marker) if self.marker else (*quote, *"{}[]"))
        self.reset()

    def reset(self) -> None:
        """Begins the next call."""
        self._is_head = bool(self._separator)
        self._in_string, self._depth, self._tail, self._num_head = False, 0, "", 0

    def push(self, text: str) -> int | None:
        """Characters of `text` up to the end of the call; None while it continues. Ends a call that cannot be valid
        early."""
        known, at = self._tail + text, 0
        before = len(self._tail)
        if self._is_head:
            num_left, self._num_head = MAX_HEADER - self._num_head, self._num_head + len(text)
            at = known.find(self._separator) + len(self._separator)
            if at < len(self._separator) or at - before > num_left:
                self._tail = known[len(known) - num_withheld(known, (self._separator,)) :]
                return num_left if len(text) >= num_left else None
            self._is_head = False
        while True:
            if self._in_string:
                found = _IN_STRING.search(known, at)
                if found is None:
                    self._tail = ""
                    return None
                if found[0] == "\\":
                    if found.end() == len(known):
                        self._tail = "\\"
                        return None
                    at = found.end() + 1
                else:
                    self._in_string, at = False, found.end()
                continue
            if not self.marker and self._depth == 0:
                while at < len(known) and known[at].isspace():
                    at += 1
                if at == len(known):
                    self._tail = ""
                    return None
                if known[at] not in "{[":
                    return max(at - before, 0)
            found = self._outside.search(known, at)
            if found is None:
                self._tail = known[max(at, len(known) - num_withheld(known, (self.marker,) if self.marker else ())) :]
                return None
            at = found.end()
            if found[0] == '"':
                self._in_string = True
            elif found[0] == self.marker:
                return at - before
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return at - before


class ChannelParser:
    """Splits an answer that consists of messages with headers."""

    def __init__(self, form: ChannelFormat, tools: ToolParameters) -> None:
        self._form, self._tools = form, tools
        self._find_end = _required_pattern((*form.ends, form.start))
        self._state: Literal["begin", "header", "text", "reasoning", "call"] = "begin"
        self._pending: str = ""
        """Undecided text; short, except within one call of `push`."""
        self._header = ""
        self._function = ""
        """The name of the called function."""
        self._body: list[str] = []
        """The arguments of a call."""
        self._separators: dict[type[Piece], str] = {}
        """For each kind of piece that the answer has, the text before its next message."""
        self._is_first_text = True
        self._output: list[Piece] = []

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_decided(self) -> bool:
        return not self._pending and self._state not in ("header", "call")

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        while self._advance():
            pass
        return self._drain()

    def finish(self) -> list[Piece]:
        if self._state in ("text", "reasoning") or (self._state == "begin" and self._pending.strip()):
            self._emit(self._pending)
        elif self._state == "header" and not self._pending.startswith(self._form.begins):
            self._emit(self._pending)  # otherwise it is an incomplete header
        elif self._state == "call":
            self._body.append(self._pending)
            self._finish_call()
        self._pending = ""
        return self._drain()

    def _drain(self) -> list[Piece]:
        output, self._output = self._output, []
        return output

    def _advance(self) -> bool:
        if not self._pending:
            return False
        match self._state:
            case "begin":
                return self._begin()
            case "header":
                return self._read_header()
            case _:
                return self._read_content()

    def _begin(self) -> bool:
        begins = self._form.begins
        if any(begin.startswith(self._pending) for begin in begins if len(self._pending) < len(begin)):
            return False
        self._open("header" if self._pending.startswith(begins) else "text")
        return True

    def _open(self, state: Literal["header", "text", "reasoning", "call"]) -> None:
        self._state, self._is_first_text = state, True

    def _read_header(self) -> bool:
        header, content, rest = self._pending.partition(self._form.content)
        if not content and len(header) <= MAX_HEADER + len(self._form.content):
            return False
        if len(header) > MAX_HEADER:
            self._open("text")
            return True
        self._pending = rest
        channel, recipient = self._form.channel.search(header), self._form.recipient.search(header)
        if recipient is not None and recipient["name"] in self._tools:
            self._function = recipient["name"]
            self._open("call")
        else:
            is_reasoning = channel is not None and channel["name"] == self._form.reasoning
            self._open("reasoning" if is_reasoning else "text")
        return True

    def _read_content(self) -> bool:
        found = self._find_end.search(self._pending)
        if found is not None:
            before = self._pending[: found.start()]
            self._pending = (
                self._pending[found.end() :] if found[0] != self._form.start else self._pending[found.start() :]
            )
            if self._state == "call":
                self._body.append(before)
                self._finish_call()
            else:
                self._emit(before)
            self._open("header")
            return True
        num_open = len(self._pending) - num_withheld(self._pending, (*self._form.ends, self._form.start))
        if self._state == "call":
            self._body.append(self._pending[:num_open])
        else:
            self._emit(self._pending[:num_open])
        self._pending = self._pending[num_open:]
        return False

    def _finish_call(self) -> None:
        body = "".join(self._body)
        self._body = []
        call = json_call(self._function, body, self._tools)
        if call is None:
            self._open("text")
            self._emit(body)
        else:
            self._output.append(call)

    def _emit(self, text: str) -> None:
        """Adds text of the current message; several messages are separated by a line break."""
        if not text:
            return
        kind = ReasoningPiece if self._state == "reasoning" else TextPiece
        separator = self._separators.get(kind, "") if self._is_first_text else ""
        self._separators[kind], self._is_first_text = "\n", False
        self._output.append(kind(separator + text))


def _num_stable(text: str) -> int:
    """Characters of `text` without white space at its end that may be dropped later."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)


_IN_STRING = re.compile(r'["\\]')


def num_withheld(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may begin one of the markers."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    return next(
        (size for size in range(longest, 0, -1) if any(marker.startswith(text[-size:]) for marker in markers)), 0
    )


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    return _required_pattern(texts) if texts else None


def _required_pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Finds the first of these texts, the longest if several begin there."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))

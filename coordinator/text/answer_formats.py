"""Formats in which models write reasoning and tool calls, as data.

A format is recognized by texts of the chat template: the first entry of a table wins whose evidence is complete. A
model of a new family needs an entry here, and no code.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

import msgspec


class JsonCalls(msgspec.Struct, frozen=True):
    """A call is a JSON object with a name and arguments; a JSON list has several calls."""

    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Names of the member with the arguments; constrained calls have the first."""
    has_arguments: bool = False
    """Whether an object without arguments is no call."""
    is_list: bool = False
    """Whether constrained calls are one JSON list."""


class HeadedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A call is its name, followed by the arguments as a JSON object."""

    head: re.Pattern[str]
    """Matches the text before the arguments; the group `name` is the name."""
    tail: str = ""
    """Text that may follow the arguments."""
    separator: str = ""
    """The end of the head, for formats without an end marker."""
    written: tuple[tuple[str, str], ...]
    """The text before and after the arguments of a constrained call, with `{name}`; the model chooses one."""


class TaggedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A call is its name, followed by arguments in tags. Values are JSON, or text for parameters of type string."""

    head: re.Pattern[str]
    pair: re.Pattern[str]
    """Matches an argument; its groups are `key` and `value`."""
    written: tuple[str, str]
    """The text before and after the arguments of a constrained call, with `{name}`."""
    written_pair: tuple[str, str, str]
    """The text before the value of an argument, with `{key}`, the text after it, and the tag in that which ends it."""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of tool calls."""

    name: str
    evidence: tuple[str, ...]
    """Texts that the chat template contains, all of them."""
    start: str
    """Marker before a call, or before a list of calls."""
    end: str = ""
    """Marker after a call. Without one, a call ends with its JSON value."""
    frame: tuple[str, ...] = ()
    """Markers around a group of calls."""
    body: JsonCalls | HeadedCalls | TaggedCalls = JsonCalls()
    is_bare: bool = False
    """Whether an answer that begins with a JSON object may be a call, without a marker."""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Markers around reasoning at the beginning of an answer."""

    start: str
    end: str


class ChannelFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of several messages, each with a header that has its channel and the recipient of a call."""

    name: str
    evidence: tuple[str, ...]
    start: str
    """Marker before the header of a message."""
    content: str
    """Marker between header and content."""
    ends: tuple[str, ...]
    """Markers after the content."""
    channel: re.Pattern[str]
    recipient: re.Pattern[str]
    """Their groups `name` are the channel, and the name of the called function."""
    reasoning: str
    """The channel of reasoning."""
    begins: tuple[str, ...]
    """Possible beginnings of the first header, whose start marker is part of the prompt."""
    channels: tuple[str, ...]
    """The channels of messages that may precede a constrained call."""
    final: str
    """The channel of the answer's text."""
    written: tuple[str, str]
    """A constrained message before and after its content, up to the header of the next one; with `{channel}`."""
    written_calls: tuple[str, ...]
    """A constrained call before its arguments, with `{name}`; the model chooses one."""
    call_end: str
    """The marker after a constrained call, which may be an end token."""


class AnswerFormat(msgspec.Struct, frozen=True):
    """The formats of a model. Without any, an answer is only text."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None

    @property
    def call_format(self) -> str:
        """Name of the format of tool calls; empty if unknown."""
        found = self.channels or self.calls
        return "" if found is None else found.name

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers. Those that are special tokens must be shown to the parser."""
        found = list[str]()
        if (reasoning := self.reasoning) is not None:
            found += [reasoning.start, reasoning.end]
        if (calls := self.calls) is not None:
            found += [calls.start, calls.end, *calls.frame, *_SEPARATORS]
        if (channels := self.channels) is not None:
            found += [channels.start, channels.content, *channels.ends, *channels.begins, *_SEPARATORS]
        return tuple(marker for marker in found if marker)


REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("◁think▷", "◁/think▷"),
)
CHANNEL_FORMATS = (
    ChannelFormat(
        name="harmony",
        evidence=("<|channel|>", "<|message|>"),
        start="<|start|>",
        content="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        channel=re.compile(r"<\|channel\|>\s*(?P<name>\w+)"),
        recipient=re.compile(r"\bto=functions\.(?P<name>[\w.-]+)"),
        reasoning="analysis",
        begins=("<|channel|>", "<|start|>", "<|message|>", " to="),
        channels=("analysis", "commentary"),
        final="final",
        written=("<|channel|>{channel}<|message|>", "<|end|><|start|>assistant"),
        written_calls=(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.{name} json<|message|>",
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
            " to=functions.{name}<|channel|>commentary json<|message|>",
        ),
        call_end="<|call|>",
    ),
)
CALL_FORMATS = (
    CallFormat(
        name="glm",
        evidence=("<tool_call>", "<arg_key>"),
        start="<tool_call>",
        end="</tool_call>",
        body=TaggedCalls(
            head=re.compile(r"\s*(?P<name>[^\s<]+)\s*"),
            pair=re.compile(
                r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*",
                re.DOTALL,
            ),
            written=("{name}\n", ""),
            written_pair=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>"),
        ),
    ),
    CallFormat(
        name="qwen3_coder",
        evidence=("<tool_call>", "<function="),
        start="<tool_call>",
        end="</tool_call>",
        body=TaggedCalls(
            head=re.compile(r"\s*<function=(?P<name>[^\s<>]+)>\s*"),
            pair=re.compile(
                r"\s*<parameter=(?P<key>[^<>]+)>\n?(?P<value>.*?)\n?</parameter>"
                r"\s*(?:</function>\s*)?",
                re.DOTALL,
            ),
            written=("\n<function={name}>\n", "</function>\n"),
            written_pair=("<parameter={key}>\n", "\n</parameter>\n", "</parameter>"),
        ),
    ),
    CallFormat(name="hermes", evidence=("<tool_call>",), start="<tool_call>", end="</tool_call>"),
    CallFormat(
        name="mistral_named",
        evidence=("[TOOL_CALLS]", "[ARGS]"),
        start="[TOOL_CALLS]",
        body=HeadedCalls(
            head=re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]"),
            separator="[ARGS]",
            written=(("{name}[ARGS]", ""),),
        ),
    ),
    CallFormat(name="mistral", evidence=("[TOOL_CALLS]",), start="[TOOL_CALLS]", body=JsonCalls(is_list=True)),
    CallFormat(
        name="deepseek",
        evidence=("<｜tool▁call▁begin｜>",),
        start="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        body=HeadedCalls(
            head=re.compile(
                r"\s*(?:function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json|(?P<plain>[\w.-]+)<｜tool▁sep｜>)"
            ),
            tail="```",
            written=(
                ("function<｜tool▁sep｜>{name}\n```json\n", "\n```"),
                ("{name}<｜tool▁sep｜>", ""),
            ),
        ),
    ),
    CallFormat(
        name="llama3_json",
        evidence=("<|start_header_id|>", '"parameters": '),
        start="<|python_tag|>",
        body=JsonCalls(arguments=("parameters", "arguments"), has_arguments=True),
        is_bare=True,
    ),
)
_SEPARATORS = ("[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>", "<|constrain|>", "<|channel|>")


def recognized_format(template: str, added_tokens: Collection[str]) -> AnswerFormat:
    """The formats of a model with this chat template, and these added tokens of the tokenizer."""
    channels = next((each for each in CHANNEL_FORMATS if all(text in template for text in each.evidence)), None)
    if channels is not None:
        return AnswerFormat(channels=channels)
    calls = next((each for each in CALL_FORMATS if all(text in template for text in each.evidence)), None)
    reasoning = (
        each for each in REASONING_FORMATS if each.end in template or {each.start, each.end} <= set(added_tokens)
    )
    return AnswerFormat(next(reasoning, None), calls)


ToolParameters = Mapping[str, frozenset[str]]
"""For each function of a request, the names of its parameters of type string."""


def tool_parameters(tools: Collection[Mapping[str, Any]]) -> ToolParameters:
    """The functions of tools in OpenAI's form."""
    return {tool["function"]["name"]: frozenset(_string_names(tool["function"].get("parameters"))) for tool in tools}


def _string_names(schema: object) -> list[str]:
    properties = cast(dict[str, Any], schema).get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return []
    return [name for name, value in cast(dict[str, Any], properties).items() if "string" in _types(value)]


def _types(schema: object) -> list[Any]:
    kind = cast(dict[str, Any], schema).get("type") if isinstance(schema, dict) else None
    return cast(list[Any], kind) if isinstance(kind, list) else [kind]

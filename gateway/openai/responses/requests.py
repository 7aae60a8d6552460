"""Conversion of requests of the Responses API to chat requests."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.bodies import converted
from gateway.errors import HttpProblem, renamed, unsupported
from gateway.openai.field_names import FieldNames
from gateway.openai.requests import ChatCompletionRequest, Count, StreamOptions, chat_request
from gateway.openai.responses.items import messages_of
from longleaf.types import Message

IGNORED = frozenset(
    (
        "service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options max_tool_calls "
        "include"
    ).split()
)
"""Fields that change no answer. They are ignored, with a warning."""
MEANINGLESS: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
"""Fields that are accepted only with these values, which have no effect."""
LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
NAMES = (
    (re.compile(r"^max_tokens\b"), "max_output_tokens"),
    (re.compile(r"^tools\[(\d+)\]\.function\."), r"tools[\1]."),
    (re.compile(r"^(?:constraint\.json_schema|response_format\.json_schema\.schema)\b"), "text.format.schema"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^(?:constraint|response_format)\b"), "text.format"),
    (re.compile(r"^(?:chat_template_kwargs\.)?reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\.tool_call_id$"), ".call_id"),
    (re.compile(r"\.tool_calls\[\d+\]"), ""),
    (re.compile(r"^messages\b"), "input"),
)
"""Names of the fields of chat requests in this API."""
SHOWN = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "store")
"""Fields of the request that the response repeats unchanged."""


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `reasoning`. Summaries do not exist, because the reasoning itself is returned."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `text`."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function of the client."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def definition(self) -> dict[str, Any]:
        """The tool in the form of chat requests."""
        fields = {name: getattr(self, name) for name in ("name", "description", "parameters", "strict")}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses."""

    model: str
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool = True
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] = {}
    user: str | None = None
    context: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def shown_fields(self) -> dict[str, Any]:
        """The fields that the response repeats."""
        return {
            **{name: getattr(self, name) for name in SHOWN},
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_shown_tool(tool) for tool in self.tools],
            "tool_choice": self.tool_choice,
            "text": {"format": self.text.format or {"type": "text"}},
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "user": self.user,
        }


class ConvertedResponsesRequest(NamedTuple):
    """A request as a chat request, with the messages that follow those of the previous response."""

    requested: ResponsesRequest
    chat: ChatCompletionRequest
    instructions: tuple[Message, ...]
    messages: tuple[Message, ...]
    names: tuple[str, ...]
    """For each of `messages`, its field."""
    ignored: list[str]
    """Names of ignored fields."""


def decode_response_request(raw: dict[str, Any]) -> ConvertedResponsesRequest:
    """Raises HttpProblem that names the field."""
    ignored = sorted(name for name, value in raw.items() if name in IGNORED and value is not None)
    requested = converted(_known(raw), ResponsesRequest)
    if requested.reasoning.summary or requested.reasoning.generate_summary:
        ignored.append("reasoning.summary")
    items = messages_of(requested.input)
    if not items:
        raise HttpProblem(400, "input: give at least one item", param="input", code="invalid_value")
    try:
        chat = chat_request(_chat_fields(requested))
    except HttpProblem as problem:
        raise renamed(problem, FieldNames(NAMES, ())) from None
    instructions = (Message("system", requested.instructions),) if requested.instructions else ()
    messages, names = zip(*items, strict=True)
    return ConvertedResponsesRequest(requested, chat, instructions, messages, names, ignored)


def _known(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that have an effect. Raises HttpProblem naming an unknown or unsupported field."""
    found, include = dict[str, Any](), raw.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        raise unsupported("include", f"{LOGPROBS} is not supported; use /v1/chat/completions")
    for name, value in raw.items():
        if value is None or name in IGNORED or value in MEANINGLESS.get(name, ()):
            continue
        if name in MEANINGLESS:
            raise unsupported(name, "this value is not supported; omit the field")
        if name not in ResponsesRequest.__struct_fields__:
            raise HttpProblem(400, f"unknown parameter: {name[:100]}", param=name[:100], code="unknown_parameter")
        found[name] = value
    return found


def _chat_fields(requested: ResponsesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": requested.model,
        "context": requested.context,
        "max_tokens": requested.max_output_tokens,
        "temperature": requested.temperature,
        "top_p": requested.top_p,
        "tools": [_tool(tool, f"tools[{i}]").definition() for i, tool in enumerate(requested.tools)],
        "tool_choice": _tool_choice(requested.tool_choice),
        "parallel_tool_calls": requested.parallel_tool_calls,
        "response_format": _response_format(requested.text.format),
        "reasoning_effort": requested.reasoning.effort,
        "stream": requested.stream,
        "stream_options": requested.stream_options,
        "user": requested.user,
        "chat_template_kwargs": requested.chat_template_kwargs,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool(tool: dict[str, Any], path: str) -> FunctionTool:
    if tool.get("type") != "function":
        raise unsupported(f"{path}.type", "only function is supported: this server runs no tools")
    return converted(tool, FunctionTool, path)


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None} | tool


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """The choice in the form of chat requests."""
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", "only function is supported")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format in the form of chat requests."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}

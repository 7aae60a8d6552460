"""Conversion of Anthropic's requests to chat requests of the OpenAI API."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.anthropic.messages import AnthropicMessage, ChatTurns, text_of
from gateway.bodies import converted
from gateway.errors import UNSUPPORTED_THREAD, HttpProblem, renamed, unsupported
from gateway.openai.field_names import FieldNames
from gateway.openai.requests import MAX_STOPS, ChatCompletionRequest, Count, chat_request
from longleaf.types import Conversation, Message

IGNORED = frozenset("service_tier inference_geo speed user_profile_id workspace_id diagnostics".split())
"""Fields that change no answer. They are ignored, with a warning."""
MEANINGLESS: Mapping[str, tuple[object, ...]] = {
    "container": ({},),
    "mcp_servers": ([],),
    "betas": ([],),
    "fallbacks": ([],),
}
"""Fields that are accepted only with these values, which have no effect."""
MAX_CLIENT_BYTES = 256
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = (
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"^tools\[(\d+)\]\.function\."), r"tools[\1]."),
    (re.compile(r"^(?:constraint\.json_schema|response_format\.json_schema\.schema)\b"), "output_config.format.schema"),
    (re.compile(r"^(?:constraint|response_format)\b.*"), "output_config.format"),
    (re.compile(r"^(?:chat_template_kwargs\.)?reasoning_effort\b"), "output_config.effort"),
    (re.compile(r"^user\b"), "metadata.user_id"),
    (re.compile(r"\btool_call_id$"), "tool_use_id"),
)
"""Names of the fields of chat requests, as Anthropic's clients know them."""


class CacheControl(msgspec.Struct, frozen=True):
    """A point up to which a prompt should be cached. It has no effect, because all prompts are cached."""

    type: str


class RequestMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `metadata`."""

    user_id: str | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ContextEdit(msgspec.Struct, frozen=True):
    """A change of the history. Only the removal of thinking is accepted, which the chat template decides."""

    type: str


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `context_management`."""

    edits: list[ContextEdit] = []


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages."""

    model: str
    messages: list[AnthropicMessage]
    max_tokens: Count | None = None
    system: str | list[dict[str, Any]] = ""
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    metadata: RequestMetadata | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    context: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ConvertedRequest(NamedTuple):
    """A request as a chat request."""

    chat: ChatCompletionRequest
    conversation: Conversation
    ignored: list[str]
    """Names of ignored fields."""
    rename: FieldNames
    """Converts the name of a field of the chat request."""
    shows_thinking: bool


def decode_messages(raw: dict[str, Any]) -> ConvertedRequest:
    """The request as a chat request. Raises HttpProblem that names the field."""
    ignored = sorted(name for name, value in raw.items() if name in IGNORED and value is not None)
    requested = converted(_known(raw), MessagesRequest)
    if not requested.messages:
        raise HttpProblem(400, "messages: give at least one", param="messages", code="invalid_value")
    for i, edit in enumerate(requested.context_management.edits if requested.context_management else ()):
        if not edit.type.startswith("clear_thinking_"):
            raise unsupported(f"context_management.edits[{i}].type", "only the removal of thinking is supported")
    thinking = requested.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        ignored.append("thinking.budget_tokens")
    turns = ChatTurns()
    if system := text_of(requested.system, "system"):
        turns.add(Message("system", system), "system")
    for i, message in enumerate(requested.messages):
        turns.add_message(message, f"messages[{i}]")
    rename = FieldNames(NAMES, tuple(turns.names))
    try:
        chat = chat_request(_chat_fields(requested))
    except HttpProblem as problem:
        raise renamed(problem, rename) from None
    shows_thinking = thinking is None or thinking.display != "omitted"
    return ConvertedRequest(chat, Conversation(tuple(turns.messages)), ignored, rename, shows_thinking)


def _known(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that have an effect. Raises HttpProblem naming an unknown or unsupported field."""
    found = dict[str, Any]()
    for name, value in raw.items():
        if value is None or name in IGNORED or value in MEANINGLESS.get(name, ()):
            continue
        if name == "thread":
            message = "thread: this server holds no conversations; send the whole conversation without thread"
            raise HttpProblem(400, message, param=name, code=UNSUPPORTED_THREAD)
        if name in MEANINGLESS:
            raise unsupported(name, "is not supported; omit the field")
        if name not in MessagesRequest.__struct_fields__:
            message = f"{name[:100]}: unknown parameter"
            raise HttpProblem(400, message, param=name[:100], code="unknown_parameter")
        found[name] = value
    return found


def _chat_fields(requested: MessagesRequest) -> dict[str, Any]:
    tools, choice, config = _tools(requested.tools), requested.tool_choice, requested.output_config
    fields: dict[str, Any] = {
        "model": requested.model,
        "context": requested.context,
        "max_tokens": requested.max_tokens,
        "stop": requested.stop_sequences or None,
        "stream": requested.stream,
        "temperature": requested.temperature,
        "top_p": requested.top_p,
        "top_k": requested.top_k,
        "tools": tools,
        "chat_template_kwargs": _template_variables(requested),
    }
    if choice is not None:
        fields["tool_choice"] = _tool_choice(choice)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if config is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            described = {"name": "answer", "schema": config.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
    client = requested.metadata.user_id if requested.metadata else None
    if client is not None and len(client.encode()) <= MAX_CLIENT_BYTES:
        fields["user"] = client
    return {name: value for name, value in fields.items() if value is not None}


def _template_variables(requested: MessagesRequest) -> dict[str, Any] | None:
    """The variables of the chat template, among them those by which models of several families switch reasoning."""
    if requested.thinking is None:
        return requested.chat_template_kwargs
    is_enabled = requested.thinking.type != "disabled"
    return {"enable_thinking": is_enabled, "thinking": is_enabled} | (requested.chat_template_kwargs or {})


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    definitions = list[dict[str, Any]]()
    for i, tool in enumerate(given):
        kind = tool.get("type") or "custom"
        if kind != "custom":
            raise unsupported(
                f"tools[{i}].type", f"{json.dumps(kind)[:100]} is not supported: this server runs no tools"
            )
        definitions.append(converted(tool, Tool, f"tools[{i}]").definition())
    return definitions


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """The choice in OpenAI's form. Raises HttpProblem without the name of the tool."""
    if choice.type != "tool":
        return TOOL_CHOICES[choice.type]
    if choice.name is None:
        raise HttpProblem(400, "tool_choice.name: is required", param="tool_choice.name", code="invalid_value")
    return {"type": "function", "function": {"name": choice.name}}

"""Conversion of OpenAI's requests to the client's."""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from gateway.bodies import EMPTY, converted
from gateway.errors import HttpProblem, unsupported
from gateway.openai.response_format import constraint_of
from gateway.openai.sources import SourcesRequest, sources_fields
from longleaf.types import Conversation, GenerateOptions, Message, ToolCall

HARMLESS = frozenset(
    (
        "store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction keep_alive "
        "cache_prompt cache_salt chat_id session_id parallel_tool_calls"
    ).split()
)
"""Fields that front ends send unasked and that change no answer. They are ignored, with a warning."""
MEANINGLESS: Mapping[str, tuple[object, ...]] = {
    "tool_choice": ("none",),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "guided_json": ("",),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
}
"""Fields that are accepted only with these values, which have no effect."""
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Bias = Annotated[dict[str, float], Meta(max_length=1024)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
TOOL_CHOICES = 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}'
MAX_STOPS = 16
MAX_EXACT_FLOAT = 1 << 53
"""Up to this value every integer has an exact float."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common fields of both kinds of completions."""

    model: str
    context: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63))] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    user: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: int = 0
    request_id: str = ""
    sources: SourcesRequest | None = None
    response_format: dict[str, Any] | None = None

    def options(self, peer: str) -> GenerateOptions:
        """The client's options, except answer length and logprobs. Raises HttpProblem that names the field."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": _seed(self.seed),
            "stop": stops,
            "logit_bias": _biases(self.logit_bias),
            "num_samples": self.n,
            "priority": self.priority,
            "request_id": self.request_id,
            "client": self.user or peer,
            "provenance": self.sources.provenance() if self.sources is not None else None,
            "constraint": constraint_of(self.response_format),
        }
        return cast(GenerateOptions, given)


class ChatCompletionRequest(CompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions, except its messages."""

    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def named_tool(self) -> str | None:
        """The name of the function that `tool_choice` selects; None if it selects none. Raises HttpProblem."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        name = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
        if self.tool_choice.get("type") != "function" or not isinstance(name, str) or not name:
            message = f"tool_choice: {TOOL_CHOICES}"
            raise HttpProblem(400, message, param="tool_choice", code="invalid_value")
        return name

    def chat_options(self) -> GenerateOptions:
        """The client's options for the chat template, and for tools."""
        tools = self.tools if self.tool_choice != "none" else []
        options: GenerateOptions = {
            "tools": tools,
            "parse_answer": True,
            "single_tool_call": bool(tools) and not self.parallel_tool_calls,
            "require_tool_call": self.tool_choice == "required",
            "required_tool": "" if self.named_tool is None else self.named_tool,
        }
        variables = self.chat_template_kwargs or {}
        if self.reasoning_effort is not None:
            variables = variables | {"reasoning_effort": self.reasoning_effort}
        return options | {"chat_template_kwargs": variables} if variables else options


class TextCompletionRequest(CompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions, except its prompt."""

    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class PromptInput(msgspec.Struct, frozen=True):
    """The prompt of POST /v1/completions."""

    prompt: str | list[str | int]


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function of a call, and its arguments as JSON."""

    name: str
    arguments: str = ""


class MessageCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int = 0


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[MessageCall] = []
    tool_call_id: str = ""


def decode_chat(raw: dict[str, Any]) -> tuple[ChatCompletionRequest, Conversation, list[str]]:
    """The request, its messages, and the names of ignored fields. Raises HttpProblem that names the field. The service
    checks the conversation itself."""
    given = cleaned(raw, ChatCompletionRequest.__struct_fields__, {"messages"})
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise HttpProblem(400, "messages: give at least one", param="messages", code="invalid_value")
    turns = cast(list[object], messages)
    requested = chat_request(given)
    conversation = Conversation(tuple(_message(turn, f"messages[{i}]") for i, turn in enumerate(turns)))
    return requested, conversation, ignored_fields(raw)


def chat_request(given: dict[str, Any]) -> ChatCompletionRequest:
    """The request with these fields, without its messages. Raises HttpProblem that names the field."""
    requested = converted(given, ChatCompletionRequest)
    if requested.top_logprobs is not None and not requested.logprobs:
        raise HttpProblem(400, "top_logprobs: needs logprobs", param="top_logprobs", code="invalid_value")
    if requested.max_tokens is not None and requested.max_completion_tokens not in (None, requested.max_tokens):
        message = "max_completion_tokens: differs from max_tokens"
        raise HttpProblem(400, message, param="max_completion_tokens", code="invalid_value")
    check_stream(requested)
    _check_tool_choice(requested)
    return requested


def _check_tool_choice(request: ChatCompletionRequest) -> None:
    """Raises HttpProblem unless the choice can be honoured."""
    choice, effort = request.tool_choice, (request.chat_template_kwargs or {}).get("reasoning_effort")
    if request.named_tool is None and choice not in ("auto", "none", "required"):
        raise HttpProblem(400, f"tool_choice: {TOOL_CHOICES}", param="tool_choice", code="invalid_value")
    if request.reasoning_effort is not None and effort not in (None, request.reasoning_effort):
        message = "reasoning_effort: differs from chat_template_kwargs.reasoning_effort"
        raise HttpProblem(400, message, param="reasoning_effort", code="invalid_value")


def decode_text(raw: dict[str, Any]) -> "tuple[TextCompletionRequest, str | array[int], list[str]]":
    """The request, its prompt, and the names of ignored fields. Raises HttpProblem that names the field."""
    given = cleaned(raw, TextCompletionRequest.__struct_fields__, {"prompt"})
    prompt = _prompt(converted({name: given.pop(name) for name in given.keys() & {"prompt"}}, PromptInput).prompt)
    requested = converted(given, TextCompletionRequest)
    check_stream(requested)
    return requested, prompt, ignored_fields(raw)


def _prompt(prompt: str | list[str | int]) -> "str | array[int]":
    """Token ids become 32-bit numbers, because Python integers take nine times the memory. Raises HttpProblem for
    several prompts, or none."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    try:
        ids = array("I", cast(list[int], prompt))
    except (TypeError, OverflowError):
        ids = array("I")
    if not ids or max(ids) >= 1 << 31:
        raise HttpProblem(400, "prompt: give one text, or the token ids of one", param="prompt", code="invalid_value")
    return ids


def check_stream(request: CompletionRequest) -> None:
    """Raises HttpProblem for stream options without `stream`."""
    if request.stream_options is not None and not request.stream:
        raise HttpProblem(400, "stream_options: needs stream", param="stream_options", code="invalid_value")


def cleaned(raw: dict[str, Any], known: tuple[str, ...], more: set[str] | None = None) -> dict[str, Any]:
    """The fields that have an effect. Raises HttpProblem naming an unknown or unsupported field."""
    found = dict[str, Any]()
    for name, value in raw.items():
        if name in known and value is not None:
            found[name] = _integer(value)
            continue
        if value is None or name in HARMLESS or _integer(value) in MEANINGLESS.get(name, ()):
            continue
        if name in MEANINGLESS:
            message = f"{name}: this value is not supported; omit the field"
            raise HttpProblem(400, message, param=name, code="unsupported_parameter")
        if name not in (more or ()):
            raise HttpProblem(400, f"unknown parameter: {name[:100]}", param=name[:100], code="unknown_parameter")
        found[name] = value
    if "sources" in found and "sources" in known:
        fields = sources_fields(found.pop("sources"))
        found |= {} if fields is None else {"sources": {name: _integer(value) for name, value in fields.items()}}
    return found


def ignored_fields(raw: dict[str, Any]) -> list[str]:
    """The names of accepted fields that are ignored."""
    used = {"parallel_tool_calls"} if raw.get("tools") else set[str]()
    return sorted(name for name, value in raw.items() if value is not None and name in HARMLESS - used)


def _integer(value: Any) -> Any:
    """Converts a float without fraction to an integer: in JSON, 8.0 and 8 are the same number."""
    is_integer = isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_FLOAT
    return int(value) if is_integer else value


def _message(raw: object, path: str) -> Message:
    if not isinstance(raw, dict):
        raise HttpProblem(400, f"{path}: is not an object", param=path, code="invalid_type")
    fields = {name: value for name, value in cast(dict[str, Any], raw).items() if value is not None}
    for name in fields.keys() - set(ChatMessage.__struct_fields__):
        if fields[name] not in EMPTY:
            raise HttpProblem(400, f"{path}.{name} is not supported", param=f"{path}.{name}", code="unsupported_value")
        del fields[name]
    turn = converted(fields, ChatMessage, path)
    if turn.content is None and not turn.tool_calls:
        raise HttpProblem(400, f"{path}: has no content", param=path, code="invalid_type")
    text = turn.content or ""
    return Message(
        "system" if turn.role == "developer" else turn.role,
        text if isinstance(text, str) else _text_of(text, f"{path}.content"),
        turn.reasoning_content or turn.reasoning,
        tuple(ToolCall(call.id, call.function.name, call.function.arguments or "{}") for call in turn.tool_calls),
        turn.tool_call_id,
    )


def _text_of(parts: list[dict[str, Any]], path: str) -> str:
    texts = list[str]()
    for i, part in enumerate(parts):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            message = f'{path}[{i}]: only parts of type "text" are supported'
            raise HttpProblem(400, message, param=f"{path}[{i}].type", code="unsupported_value")
        if not isinstance(text, str):
            raise HttpProblem(400, f"{path}[{i}].text: is not a string", param=f"{path}[{i}].text", code="invalid_type")
        for name in part.keys() - {"type", "text"}:
            if part[name] not in EMPTY:
                raise unsupported(f"{path}[{i}].{name[:100]}", "is not supported")
        texts.append(text)
    return "".join(texts)


def _seed(given: int | None) -> int | None:
    """Seeds are unsigned in the protocol: a negative one is converted to the unsigned number with the same 64 bits."""
    return given + (1 << 64) if given is not None and given < 0 else given


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    if not all(name.isascii() and name.isdigit() and len(name) < 11 for name in given):
        raise HttpProblem(400, "logit_bias: its names must be token ids", param="logit_bias", code="invalid_value")
    return {int(name): bias for name, bias in given.items()}

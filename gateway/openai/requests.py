"""Conversion of OpenAI's requests to the client's."""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from gateway.bodies import converted
from gateway.errors import HttpProblem
from gateway.openai.response_format import constraint_of
from gateway.openai.sources import SourcesRequest, sources_fields
from longleaf.types import Conversation, GenerateOptions, Message

HARMLESS = frozenset("store metadata service_tier parallel_tool_calls safety_identifier prompt_cache_key".split())
"""Accepted fields without effect."""
MEANINGLESS: Mapping[str, tuple[object, ...]] = {
    "tool_choice": ("none",),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
"""Fields that are accepted only with these values, which have no effect."""
EMPTY: tuple[object, ...] = (None, [], {}, "")
"""Accepted values of unsupported fields in messages and their parts, because messages of earlier answers contain such
fields."""
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Bias = Annotated[dict[str, float], Meta(max_length=1024)]
Role = Literal["system", "developer", "user", "assistant"]
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
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class TextCompletionRequest(CompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions, except its prompt."""

    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class PromptInput(msgspec.Struct, frozen=True):
    """The prompt of POST /v1/completions."""

    prompt: str | list[str | int]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Role
    content: str | list[dict[str, Any]]
    name: str | None = None


def decode_chat(raw: dict[str, Any]) -> tuple[ChatCompletionRequest, Conversation]:
    """Raises HttpProblem that names the field. The service checks the conversation itself."""
    given = cleaned(raw, ChatCompletionRequest.__struct_fields__, {"messages"})
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise HttpProblem(400, "messages: give at least one", param="messages", code="invalid_value")
    turns = cast(list[object], messages)
    requested = converted(given, ChatCompletionRequest)
    if requested.top_logprobs is not None and not requested.logprobs:
        raise HttpProblem(400, "top_logprobs: needs logprobs", param="top_logprobs", code="invalid_value")
    if requested.max_tokens is not None and requested.max_completion_tokens not in (None, requested.max_tokens):
        message = "max_completion_tokens: differs from max_tokens"
        raise HttpProblem(400, message, param="max_completion_tokens", code="invalid_value")
    check_stream(requested)
    return requested, Conversation(tuple(_message(turn, f"messages[{i}]") for i, turn in enumerate(turns)))


def decode_text(raw: dict[str, Any]) -> "tuple[TextCompletionRequest, str | array[int]]":
    """The request and its prompt. Raises HttpProblem that names the field."""
    given = cleaned(raw, TextCompletionRequest.__struct_fields__, {"prompt"})
    prompt = _prompt(converted({name: given.pop(name) for name in given.keys() & {"prompt"}}, PromptInput).prompt)
    requested = converted(given, TextCompletionRequest)
    check_stream(requested)
    return requested, prompt


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
        if value is None or name in HARMLESS or value in MEANINGLESS.get(name, ()):
            continue
        if name in MEANINGLESS:
            message = f"{name}: is not supported; omit it, because this server only generates text"
            raise HttpProblem(400, message, param=name, code="unsupported_parameter")
        if name not in known and name not in (more or ()):
            raise HttpProblem(400, f"unknown parameter: {name[:100]}", param=name[:100], code="unknown_parameter")
        found[name] = _integer(value)
    if "sources" in found and "sources" in known:
        fields = sources_fields(found.pop("sources"))
        found |= {} if fields is None else {"sources": {name: _integer(value) for name, value in fields.items()}}
    return found


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
    text = turn.content if isinstance(turn.content, str) else _text_of(turn.content, f"{path}.content")
    return Message("system" if turn.role == "developer" else turn.role, text)


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
                param = f"{path}[{i}].{name[:100]}"
                raise HttpProblem(400, f"{param}: is not supported", param=param, code="unsupported_value")
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

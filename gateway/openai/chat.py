"""POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import MemoryLease, body_of, share_of
from gateway.callers import client_of, peer_of
from gateway.generations import argument_pieces
from gateway.models import model_name, target_of
from gateway.openai.answers import (
    PendingCompletion,
    answer,
    exactness_of,
    finite,
    new_id,
    now,
    reason_of,
    text_logprobs,
)
from gateway.openai.lengths import with_length
from gateway.openai.requests import ChatCompletionRequest, decode_chat
from gateway.openai.response_format import NAMES as FORMAT_NAMES
from gateway.openai.sources import NAMES as SOURCE_NAMES
from gateway.openai.sources import annotation_fields, source_reader
from longleaf.sampling import Logprobs
from longleaf.types import Delta, Finished, GenerateOptions, ToolCall

NAMES = {
    "return_token_bytes": "logprobs",
    "text": "messages",
    "chat_template_kwargs.reasoning_effort": "reasoning_effort",
    "require_tool_call": "tool_choice",
    "required_tool": "tool_choice",
    **SOURCE_NAMES,
    **FORMAT_NAMES,
}


async def chat(request: Request) -> Response:
    with share_of(request) as share:
        return await answer(request, await _start_completion(request, share), share)


async def _start_completion(request: Request, share: MemoryLease) -> PendingCompletion:
    """Only the return value references the conversation."""
    client = client_of(request)
    served = await model_name(request, client)  # authenticates the caller before the body is read
    requested, conversation, ignored = await body_of(request, share, decode_chat)
    target = target_of(served, requested.model, requested.context)
    sources = source_reader(client, request, requested.sources, target.context)
    events = client.generate(conversation, context=target.context, **generate_options(requested, peer_of(request)))
    names = NAMES | {"context": "model" if requested.context is None else "context"}
    if requested.max_tokens is None and requested.max_completion_tokens is not None:
        names["sampling.max_token_count"] = "max_completion_tokens"
    formatter = ChatChunkFormatter(target.model, requested)
    return PendingCompletion(events, formatter, sources, requested.stream, names, ignored)


def generate_options(requested: ChatCompletionRequest, peer: str) -> GenerateOptions:
    """The client's options for a chat request. Raises HttpProblem that names the field."""
    given = requested.max_completion_tokens if requested.max_tokens is None else requested.max_tokens
    options = with_length(requested.options(peer), given) | requested.chat_options()
    if requested.logprobs:
        options |= {"num_logprobs": requested.top_logprobs or 0, "with_token_bytes": True}
    return options


class ChatChunkFormatter:
    """Formats answers as chat completions."""

    def __init__(self, model: str, request: ChatCompletionRequest) -> None:
        self.num_samples = request.n
        self.with_usage = request.stream_options is not None and request.stream_options.include_usage
        self._has_logprobs = request.logprobs
        self._lengths, self._num_calls = [0] * request.n, [0] * request.n
        self._base: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "", "created": now(), "model": model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._base, "object": "chat.completion.chunk", "system_fingerprint": None, "choices": choices}
        return chunk | {"usage": None} if self.with_usage else chunk

    def begin(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [self._chunk([_choice(sample, first)]) for sample in range(self.num_samples)]

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        self._lengths[delta.sample] += len(delta.text)
        parts: list[dict[str, Any]] = [{"reasoning_content": delta.reasoning}] if delta.reasoning else []
        if delta.text:
            parts.append({"content": delta.text})
        for call in delta.tool_calls:
            parts += [{"tool_calls": [piece]} for piece in _call_pieces(self._num_calls[delta.sample], call)]
            self._num_calls[delta.sample] += 1
        choices = [_choice(delta.sample, part) for part in parts or [{"content": ""}]]
        if self._has_logprobs:
            choices[0]["logprobs"] = _logprobs([delta])
        return [self._chunk([choice]) for choice in choices]

    def finish(self, finished: Finished, fields: dict[str, Any]) -> dict[str, Any]:
        annotations = annotation_fields(fields, self._lengths[finished.sample])
        reason = _reason(finished, has_calls=self._num_calls[finished.sample] > 0)
        choice = _choice(finished.sample, annotations, reason)
        return self._chunk([choice | fields]) | exactness_of([finished])

    def last(self, usage: dict[str, Any], exactness: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage, **exactness}

    def whole(
        self, deltas: list[list[Delta]], ends: list[Finished], fields: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": _message(reported, more),
                "logprobs": _logprobs(reported) if self._has_logprobs else None,
                "finish_reason": _reason(end, has_calls=any(delta.tool_calls for delta in reported)),
                **more,
            }
            for i, (reported, end, more) in enumerate(zip(deltas, ends, fields, strict=True))
        ]
        base = {**self._base, "object": "chat.completion", "system_fingerprint": None}
        return {**base, "choices": choices, "usage": usage}


def _message(deltas: list[Delta], fields: dict[str, Any]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning := "".join(delta.reasoning for delta in deltas):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call, call.arguments) for call in calls]
    return message | annotation_fields(fields, len(content))


def _reason(finished: Finished, *, has_calls: bool) -> str:
    """Finish reason in OpenAI's terms, for a choice with or without tool calls."""
    reason = reason_of(finished)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_pieces(index: int, call: ToolCall) -> Iterator[dict[str, Any]]:
    """The pieces of a call in a stream: id and name first, then the arguments."""
    yield {"index": index, **_call(call, "")}
    for piece in argument_pieces(call):
        yield {"index": index, "function": {"arguments": piece}}


def _choice(sample: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": sample, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprobs(deltas: list[Delta]) -> dict[str, Any]:
    return {"content": [_token(each) for each in text_logprobs(deltas)], "refusal": None}


def _token(logprobs: Logprobs) -> dict[str, Any]:
    tops = [_entry(top.token_bytes, top.logprob) for top in logprobs.top]
    return _entry(logprobs.token_bytes, logprobs.logprob) | {"top_logprobs": tops}


def _entry(content: bytes | None, logprob: float) -> dict[str, Any]:
    content = content or b""
    return {"token": content.decode(errors="replace"), "bytes": list(content), "logprob": finite(logprob)}

"""Answers in Anthropic's format, streamed and whole."""

import json
from collections.abc import Iterator
from typing import Any

from gateway.errors import HttpProblem
from gateway.generations import EventStream, argument_pieces
from gateway.openai.answers import exactness_of
from gateway.sse import event
from longleaf.types import Delta, Finished, Started, ToolCall, Usage

PING = event({"type": "ping"}, "ping")


class MessageFormatter:
    """Formats an answer as a message of blocks: thinking, text and tool_use."""

    num_samples = 1

    def __init__(self, message_id: str, model: str, *, shows_thinking: bool) -> None:
        self._id, self._model, self._shows_thinking = message_id, model, shows_thinking
        self._num_blocks = 0
        self._open = ""
        """The type of the open block; empty without one."""
        self._has_calls = False

    def begin(self, started: Started | None) -> EventStream:
        usage = Usage(started.prompt_tokens, started.cached_tokens) if started is not None else Usage()
        message = self._message([], None, usage)
        yield _event("message_start", message=message)
        yield PING

    def delta(self, delta: Delta) -> EventStream:
        if delta.reasoning and self._shows_thinking:
            yield from self._open_block("thinking", {"thinking": "", "signature": ""})
            yield self._block_delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._open_block("text", {"text": ""})
            yield self._block_delta({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            self._has_calls = True
            yield from self._close_block()
            yield from self._open_block("tool_use", {"id": call.id, "name": call.name, "input": {}})
            for piece in argument_pieces(call):
                yield self._block_delta({"type": "input_json_delta", "partial_json": piece})
            yield from self._close_block()

    async def finish(self, finished: Finished) -> EventStream:
        return self._end(finished)

    def _end(self, finished: Finished) -> Iterator[bytes]:
        yield from self._close_block()
        delta = _stop_fields(finished, has_calls=self._has_calls)
        usage = _usage(finished.usage)
        yield _event("message_delta", delta=delta, usage=usage, **exactness_of([finished]))

    def end(self, ends: list[Finished]) -> EventStream:
        del ends
        yield _event("message_stop")

    def error(self, problem: HttpProblem) -> bytes:
        return event(problem.anthropic_body, "error")

    async def whole(self, deltas: list[list[Delta]], ends: list[Finished]) -> dict[str, Any]:
        blocks, (finished,) = self._blocks(deltas[0]), ends
        return self._message(blocks, finished, finished.usage) | exactness_of(ends)

    def _blocks(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        blocks = list[dict[str, Any]]()
        parts = dict[str, list[str]](thinking=[], text=[])

        def close(kind: str) -> None:
            if text := "".join(parts[kind]):
                more = {"signature": ""} if kind == "thinking" else {}
                blocks.append({"type": kind, kind: text, **more})
            parts[kind].clear()

        for delta in deltas:
            if delta.reasoning and self._shows_thinking:
                close("text")
                parts["thinking"].append(delta.reasoning)
            if delta.text:
                close("thinking")
                parts["text"].append(delta.text)
            for call in delta.tool_calls:
                close("thinking")
                close("text")
                blocks.append(_tool_use(call))
        close("thinking")
        close("text")
        return blocks

    def _message(self, blocks: list[dict[str, Any]], finished: Finished | None, usage: Usage) -> dict[str, Any]:
        has_calls = any(block["type"] == "tool_use" for block in blocks)
        stop = _stop_fields(finished, has_calls=has_calls)
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **stop,
            "usage": _usage(usage),
        }

    def _open_block(self, kind: str, fields: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close_block()
        self._open = kind
        block = {"type": kind, **fields}
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close_block(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._num_blocks)
            self._open = ""
            self._num_blocks += 1


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _stop_fields(finished: Finished | None, *, has_calls: bool) -> dict[str, Any]:
    if finished is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finished.reason == "length":
        reason = "max_tokens"
    elif finished.matched_stop:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": finished.matched_stop or None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts of tokens. Tokens whose keys and values were in memory are counted apart, as Anthropic does."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }

"""Answers of the Responses API, streamed and whole."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from gateway.errors import HttpProblem
from gateway.generations import EventStream, argument_pieces
from gateway.openai.answers import exactness_of, now
from gateway.sse import event
from longleaf.types import Delta, Finished, Message, Started, ToolCall, Usage


class AnswerEvent(NamedTuple):
    """A server-sent event, without its sequence number."""

    type: str
    fields: dict[str, Any]


class ResponseFormatter:
    """Formats an answer as a response of items: reasoning, messages and function calls."""

    num_samples = 1

    def __init__(self, fields: dict[str, Any], store: Callable[[str, bytes, Message], None]) -> None:
        """`fields` are those of the request that the response repeats; `store` stores the response by id, as JSON, with
        the message of the answer."""
        self.id = _new_id("resp")
        self._fields, self._created, self._store = fields, now(), store
        self._output = OutputItems()
        self._num_events = 0
        self._last: dict[str, Any] = {}

    def begin(self, started: Started | None) -> EventStream:
        del started
        response = self._response("in_progress")
        yield self._encoded(AnswerEvent("response.created", {"response": response}))
        yield self._encoded(AnswerEvent("response.in_progress", {"response": response}))

    def delta(self, delta: Delta) -> EventStream:
        return map(self._encoded, self._output.add(delta))

    async def finish(self, finished: Finished) -> EventStream:
        """The events that complete the last item. The response is stored now, so that it can be continued as soon as
        the client has received its end."""
        events = list(self._output.close("incomplete" if finished.reason == "length" else "completed"))
        self._last = self._finished(finished)
        return map(self._encoded, events)

    def end(self, ends: list[Finished]) -> EventStream:
        del ends
        yield self._encoded(AnswerEvent(f"response.{self._last['status']}", {"response": self._last}))

    def error(self, problem: HttpProblem) -> bytes:
        facts = {"code": problem.code, "message": problem.message, "param": problem.param}
        # clients of OpenAI raise errors for events with `error`
        return self._encoded(AnswerEvent("error", facts | problem.body))

    async def whole(self, deltas: list[list[Delta]], ends: list[Finished]) -> dict[str, Any]:
        for delta in deltas[0]:
            list(self._output.add(delta))
        list(self._output.close("incomplete" if ends[0].reason == "length" else "completed"))
        return self._finished(ends[0])

    def _finished(self, finished: Finished) -> dict[str, Any]:
        is_cut = finished.reason == "length"
        response = self._response("incomplete" if is_cut else "completed", _usage(finished.usage))
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response |= exactness_of([finished])
        self._store(self.id, msgspec.json.encode(response), self._output.message())
        return response

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output.items),
            "truncation": "disabled",
            "usage": usage,
            **self._fields,
        }

    def _encoded(self, answer_event: AnswerEvent) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        kind, fields = answer_event
        return event({"type": kind, "sequence_number": number, **fields}, kind)


class OutputItems:
    """The items of an answer, and the events by which they grow."""

    def __init__(self) -> None:
        self.items = list[dict[str, Any]]()
        """The complete items."""
        self._open: dict[str, Any] | None = None
        self._parts = list[str]()
        """The text of the open item."""
        self._texts, self._thoughts, self._calls = list[str](), list[str](), list[ToolCall]()

    def message(self) -> Message:
        """The answer as a message of a conversation."""
        return Message("assistant", "".join(self._texts), "".join(self._thoughts), tuple(self._calls))

    def add(self, delta: Delta) -> Iterator[AnswerEvent]:
        """The events of a Delta."""
        if delta.reasoning:
            self._thoughts.append(delta.reasoning)
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.text:
            self._texts.append(delta.text)
            yield from self._add_text("message", delta.text)
        for call in delta.tool_calls:
            self._calls.append(call)
            yield from self.close("completed")
            yield from self._add_call(call)

    def close(self, status: str) -> Iterator[AnswerEvent]:
        """The events that complete the open item, if there is one."""
        item, text = self._open, "".join(self._parts)
        if item is None:
            return
        kind, part = _text_kind(item), _part(item, text)
        place = self._place(item) | {"content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield AnswerEvent(f"response.{kind}.done", place | {"text": text} | more)
        yield AnswerEvent("response.content_part.done", place | {"part": part})
        done = item | {"status": status, "content": [part]}
        self._open = None
        yield AnswerEvent("response.output_item.done", {"output_index": len(self.items), "item": done})
        self.items.append(done)

    def _add_text(self, kind: str, text: str) -> Iterator[AnswerEvent]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close("completed")
            yield from self._begin(kind)
        item = self._open
        assert item is not None
        self._parts.append(text)
        text_kind = _text_kind(item)
        more: dict[str, Any] = {"logprobs": []} if text_kind == "output_text" else {}
        fields = self._place(item) | {"content_index": 0, "delta": text} | more
        yield AnswerEvent(f"response.{text_kind}.delta", fields)

    def _begin(self, kind: str) -> Iterator[AnswerEvent]:
        item: dict[str, Any] = {"id": "", "type": kind, "status": "in_progress"}
        if kind == "reasoning":
            item |= {"id": _new_id("rs"), "summary": [], "encrypted_content": None}
        else:
            item |= {"id": _new_id("msg"), "role": "assistant"}
        self._open = item
        self._parts.clear()
        yield AnswerEvent(
            "response.output_item.added", {"output_index": len(self.items), "item": item | {"content": []}}
        )
        place = self._place(item) | {"content_index": 0}
        yield AnswerEvent("response.content_part.added", place | {"part": _part(item, "")})

    def _add_call(self, call: ToolCall) -> Iterator[AnswerEvent]:
        item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        place = self._place(item)
        yield AnswerEvent("response.output_item.added", {"output_index": len(self.items), "item": item})
        for piece in argument_pieces(call):
            yield AnswerEvent("response.function_call_arguments.delta", place | {"delta": piece})
        done = {"name": call.name, "arguments": call.arguments}
        yield AnswerEvent("response.function_call_arguments.done", place | done)
        whole = item | {"status": "completed", "arguments": call.arguments}
        yield AnswerEvent("response.output_item.done", {"output_index": len(self.items), "item": whole})
        self.items.append(whole)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _text_kind(item: dict[str, Any]) -> str:
    return "reasoning_text" if item["type"] == "reasoning" else "output_text"


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    kind = _text_kind(item)
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

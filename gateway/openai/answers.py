"""Responses of both kinds of completions, streamed and whole."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import MemoryLease, json_response
from gateway.errors import HttpProblem, problem_of
from gateway.openai.models import MISSING
from gateway.openai.sources import SourceReader
from gateway.sse import DONE, EventResponse, cancel_on_disconnect, event
from longleaf.errors import LongleafError, Unavailable
from longleaf.sampling import Logprobs
from longleaf.types import Delta, Event, Finished, Progress, Recovering, Started, Usage

LEAST_LOGPROB = -9999.0
"""Replaces a logprob of -inf, which JSON cannot represent and which OpenAI's types do not allow to be null. vLLM sends
the same value."""
REASONS = {"end_token": "stop", "stop": "stop", "stop_token": "stop", "length": "length"}
WARNING = "longleaf-warning"
"""Response header that lists ignored fields, and restrictions of the answer."""
Names = dict[str, str]


class ChunkFormatter(Protocol):
    """Formats the parts of an answer."""

    num_samples: int
    with_usage: bool
    """Whether the last chunk of a stream has the usage."""

    def begin(self) -> list[dict[str, Any]]:
        """Chunks before all others."""
        ...

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a Delta."""
        ...

    def finish(self, finished: Finished, fields: dict[str, Any]) -> dict[str, Any]:
        """The chunk that finishes a sample, with additional fields of its choice."""
        ...

    def last(self, usage: dict[str, Any], exactness: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the usage."""
        ...

    def whole(
        self, deltas: list[list[Delta]], ends: list[Finished], fields: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The complete answer, if it is not streamed, with additional fields of each choice."""
        ...


def new_id(prefix: str) -> str:
    """Id of one answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


class WaitStatus:
    """Text of the heartbeat comments."""

    def __init__(self) -> None:
        self._text = "waiting"

    def record(self, event: Event) -> None:
        match event:
            case Started(queue_position=place) if place:
                self._text = f"queued {place}"
            case Progress(processed, total):
                self._text = f"read {processed} of {total} tokens"
            case Recovering(missing_weights=fraction) if fraction:
                self._text = f"recovering, {fraction:.0%} of the weights are being read"
            case Recovering():
                self._text = f"recovering, {event.recovered_tokens} of {event.total_tokens} tokens"
            case _:
                pass

    def __call__(self) -> str:
        return self._text


class PendingCompletion(NamedTuple):
    """A generation that has not started."""

    events: AsyncGenerator[Event, None]
    formatter: ChunkFormatter
    sources: SourceReader
    is_streamed: bool
    names: Names
    """HTTP names of the service's fields, and of `context`."""
    ignored: list[str]
    """Names of fields of the request that are ignored."""


async def answer(request: Request, asking: PendingCompletion, share: MemoryLease) -> Response:
    """The answer, streamed or whole. Errors before its first byte become the status. `share` is released at the first
    event, because the prompt is not needed after that. Raises HttpProblem."""
    events, formatter, sources, is_streamed, names, ignored = asking
    try:
        try:
            first = await cancel_on_disconnect(request, anext(events))
        except StopAsyncIteration:
            raise Unavailable("the service ended the stream before the answer") from None
        share.release()
        headers = _warning_headers(ignored, first)
        if not is_streamed:
            whole = await cancel_on_disconnect(request, _whole(events, formatter, sources))
            return json_response(whole, headers=headers)
    except LongleafError as error:
        await events.aclose()
        raise _problem(error, names) from None
    except BaseException:
        await events.aclose()
        raise
    waiting = WaitStatus()
    waiting.record(first)
    # EventResponse is callable like a Response, but not a subclass
    stream = _stream(first, events, formatter, sources, waiting.record, names)
    return cast(Response, EventResponse(stream, waiting, headers=headers))


def _warning_headers(ignored: list[str], first: Event) -> dict[str, str]:
    warnings = [f"ignored: {', '.join(ignored)}"] if ignored else []
    warnings += first.warnings if isinstance(first, Started) else ()
    return {WARNING: "; ".join(warnings).encode("ascii", "replace").decode()} if warnings else {}


def _is_shown(delta: Delta) -> bool:
    return bool(delta.text or delta.reasoning or delta.tool_calls or any(text_logprobs([delta])))


def _problem(error: LongleafError, names: Names) -> HttpProblem:
    return problem_of(error, names, MISSING)


async def _stream(
    first: Event,
    events: AsyncGenerator[Event, None],
    formatter: ChunkFormatter,
    sources: SourceReader,
    note: Callable[[Event], None],
    names: Names,
) -> AsyncGenerator[bytes, None]:
    del first  # it means that the request was admitted; `waiting` has reported its queue position
    for chunk in formatter.begin():
        yield event(chunk)
    ends = list[Finished]()
    try:
        async with aclosing(events):
            async for item in events:
                match item:
                    case Delta() if _is_shown(item):
                        for chunk in formatter.delta(item):
                            yield event(chunk)
                    case Finished():
                        ends.append(item)
                        yield event(formatter.finish(item, await sources.choice_fields(item)))
                    case _:
                        note(item)
        if len(ends) < formatter.num_samples:
            raise Unavailable("the service ended the stream before the end of the answer")
    except LongleafError as error:
        yield event(_problem(error, names).body, "error")
        return
    if formatter.with_usage:
        yield event(formatter.last(usage_of(ends), exactness_of(ends)))
    yield DONE


async def _whole(
    events: AsyncGenerator[Event, None], formatter: ChunkFormatter, sources: SourceReader
) -> dict[str, Any]:
    deltas: list[list[Delta]] = [[] for _ in range(formatter.num_samples)]
    ends = dict[int, Finished]()
    async with aclosing(events):
        async for event in events:
            match event:
                case Delta(sample=sample):
                    deltas[sample].append(event)
                case Finished(sample=sample):
                    ends[sample] = event
                case _:
                    pass
    if len(ends) < formatter.num_samples:
        raise Unavailable("the service ended the stream before the end of the answer")
    ordered = [ends[sample] for sample in sorted(ends)]
    fields = [await sources.choice_fields(end) for end in ordered]
    return formatter.whole(deltas, ordered, fields, usage_of(ordered)) | exactness_of(ordered)


def exactness_of(ends: list[Finished]) -> dict[str, Any]:
    """Whether all samples are exact, and otherwise the reason. For quantized weights, how they are computed."""
    note = next((end.exactness_note for end in ends if not end.is_exact), None)
    fields: dict[str, Any] = {"exact": True} if note is None else {"exact": False, "exactness_note": note}
    dequantization = next((end.dequantization for end in ends), "")
    return fields | ({"dequantization": dequantization} if dequantization else {})


def usage_of(ends: list[Finished]) -> dict[str, Any]:
    """Usage of all samples together, which share one prompt."""
    usage = ends[0].usage if ends else Usage()
    answered_tokens = sum(end.usage.completion_tokens for end in ends)
    drafted_tokens = sum(end.usage.drafted_tokens for end in ends)
    accepted_tokens = sum(end.usage.accepted_tokens for end in ends)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": answered_tokens,
        "total_tokens": usage.prompt_tokens + answered_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": drafted_tokens - accepted_tokens,
            "reasoning_tokens": sum(end.usage.reasoning_tokens for end in ends),
        },
    }


def reason_of(finished: Finished) -> str:
    """Finish reason in OpenAI's terms."""
    return REASONS.get(finished.reason, "stop")


def finite(logprob: float) -> float:
    """A logprob that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


def text_logprobs(deltas: Iterable[Delta]) -> Iterator[Logprobs]:
    """The logprobs of tokens with text; the end token has none and is omitted."""
    return (entry for delta in deltas for entry in delta.logprobs if entry.token_bytes)

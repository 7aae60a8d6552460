"""Responses to requests for a generation, streamed as events or whole, in the format of any API."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import MemoryLease, json_response
from gateway.errors import HttpProblem
from gateway.sse import EventResponse, cancel_on_disconnect
from longleaf.errors import LongleafError, Unavailable
from longleaf.types import Delta, Event, Finished, Progress, Recovering, Started, ToolCall

WARNING = "longleaf-warning"
"""Response header that lists ignored fields, and restrictions of the answer."""
ARGUMENTS_PIECE = 1 << 14
"""Maximum characters of a piece of arguments in a stream."""
EventStream = Iterable[bytes]
"""Encoded server-sent events."""
GenerationEvents = AsyncGenerator[Event, None]


class AnswerFormatter(Protocol):
    """Formats the answers of one generation for an API."""

    num_samples: int

    def begin(self, started: Started | None) -> EventStream:
        """Events before all others. `started` is the admission, if the service reported it first."""
        ...

    def delta(self, delta: Delta) -> EventStream:
        """The events of a Delta."""
        ...

    async def finish(self, finished: Finished) -> EventStream:
        """The events that finish a sample."""
        ...

    def end(self, ends: list[Finished]) -> EventStream:
        """Events after all samples."""
        ...

    def error(self, problem: HttpProblem) -> bytes:
        """The event of an error that ends the stream."""
        ...

    async def whole(self, deltas: list[list[Delta]], ends: list[Finished]) -> dict[str, Any]:
        """The complete answer, if it is not streamed; `deltas` and `ends` are in the order of the samples."""
        ...


class PendingAnswer(NamedTuple):
    """A generation that has not started."""

    events: GenerationEvents
    formatter: AnswerFormatter
    is_streamed: bool
    problem: Callable[[LongleafError], HttpProblem]
    """The HTTP error for an error of the service."""
    ignored: list[str]
    """Names of fields of the request that are ignored."""
    ping: bytes = b""
    """An event that is sent with each heartbeat comment."""


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


async def respond(request: Request, pending: PendingAnswer, share: MemoryLease) -> Response:
    """The answer, streamed or whole. Errors before its first byte become the status. `share` is released at the first
    event, because the prompt is not needed after that. Raises HttpProblem."""
    events = pending.events
    try:
        try:
            first = await cancel_on_disconnect(request, anext(events))
        except StopAsyncIteration:
            raise Unavailable("the service ended the stream before the answer") from None
        share.release()
        headers = _warning_headers(pending.ignored, first)
        if not pending.is_streamed:
            whole = await cancel_on_disconnect(request, _whole(events, pending.formatter))
            return json_response(whole, headers=headers)
    except LongleafError as error:
        await events.aclose()
        raise pending.problem(error) from None
    except BaseException:
        await events.aclose()
        raise
    waiting = WaitStatus()
    waiting.record(first)
    stream = _stream(first, pending, waiting.record)
    # EventResponse is callable like a Response, but not a subclass
    response = EventResponse(stream, waiting, headers=headers, ping=pending.ping, error=pending.formatter.error)
    return cast(Response, response)


def _warning_headers(ignored: list[str], first: Event) -> dict[str, str]:
    warnings = [f"ignored: {', '.join(ignored)}"] if ignored else []
    warnings += first.warnings if isinstance(first, Started) else ()
    return {WARNING: "; ".join(warnings).encode("ascii", "replace").decode()} if warnings else {}


async def _stream(first: Event, pending: PendingAnswer, record: Callable[[Event], None]) -> AsyncGenerator[bytes, None]:
    formatter, ends = pending.formatter, list[Finished]()
    for content in formatter.begin(first if isinstance(first, Started) else None):
        yield content
    try:
        async with aclosing(pending.events):
            async for item in pending.events:
                match item:
                    case Delta():
                        for content in formatter.delta(item):
                            yield content
                    case Finished():
                        ends.append(item)
                        for content in await formatter.finish(item):
                            yield content
                    case _:
                        record(item)
        if len(ends) < formatter.num_samples:
            raise Unavailable("the service ended the stream before the end of the answer")
    except LongleafError as error:
        yield formatter.error(pending.problem(error))
        return
    for content in formatter.end(ends):
        yield content


async def _whole(events: GenerationEvents, formatter: AnswerFormatter) -> dict[str, Any]:
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
    return await formatter.whole(deltas, [ends[sample] for sample in sorted(ends)])


def argument_pieces(call: ToolCall) -> Iterator[str]:
    """The arguments of a call in pieces for a stream."""
    for start in range(0, len(call.arguments), ARGUMENTS_PIECE):
        yield call.arguments[start : start + ARGUMENTS_PIECE]

"""Buffers generations whose clients are disconnected, and replays them when a client resumes."""

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial

import msgspec
from blake3 import blake3

from coordinator.handlers.fair_share import shares_of
from coordinator.handlers.resumable_sessions import CallLater, call_later
from coordinator.task_set import TaskSet
from longleaf.errors import (
    Cancelled,
    InvalidArgument,
    LongleafError,
    NotFound,
    ResourceExhausted,
    StorageUnavailable,
    Unavailable,
)
from longleaf.types import Conversation, Delta, Event, Finished, Generate, Message, Recovering, Started

MAX_RESUMABLE = 256
"""Maximum number of generations held concurrently."""
MAX_WEIGHT = 1 << 14
"""Maximum number of tokens, alternatives and attribution sources of one generation that are kept for replay."""
RETRY_SECONDS = 2.0


class ResumableGeneration:
    """The events of one generation, kept for replay. Generation continues while a client reads, and otherwise until the
    engine's buffer is full. `on_end` is called when the generation fails, and when it had no reader for the
    `resume_seconds` of the request; both may happen. `question` is the digest of the request's input. `past_events` has
    the events that clients of an earlier run of the service have read."""

    def __init__(
        self,
        request: Generate,
        question: bytes,
        events: AsyncGenerator[Event, None],
        later: CallLater,
        on_end: Callable[["ResumableGeneration"], None],
        past_events: Iterable[Event] = (),
    ) -> None:
        self.account = request.account
        self._question = question
        self._seconds = request.resume_seconds
        self._events = events
        self._call_later = later
        self._on_end = on_end
        self._log: deque[Event] = deque()
        self._num_dropped = 0
        """Number of events dropped from the front of the log."""
        self._dropped_tokens = 0
        self._weight = 0
        self._started: Started | None = None
        self._recovering: Recovering | None = None
        """The latest event if it is a Recovering. It is not logged, because it only describes the present."""
        self._error: Exception | None = None
        """The error that ended the generation."""
        self._is_over = False
        """The last event is in the log."""
        self._num_readers = 0
        self._timer = later(self._seconds, self._on_timeout)
        self._step: asyncio.Task[None] | None = None
        for event in past_events:
            self._append_event(event)

    @property
    def is_cut_off(self) -> bool:
        """Whether the service ended before the answer did."""
        return isinstance(self._error, Unavailable) and not isinstance(self._error, StorageUnavailable)

    def matches(self, request: Generate) -> bool:
        """Whether `request` has the same input."""
        return request_digest(request) == self._question

    async def read(self, token_index: int = 0) -> AsyncGenerator[Event, None]:
        """Yields Started, then the events from the token at `token_index` on, with Recovering events in between.
        Closing the iterator does not end the generation.

        Raises InvalidArgument if no delta begins at the index or if it is no longer held, and the errors of the
        generation.
        """
        self._attach_reader()
        try:
            number, recovering = self._find(token_index), None
            if number > 0 and self._started is not None:
                yield self._started
            while (event := await self._get(number, recovering)) is not None:
                yield event
                if isinstance(event, Recovering):
                    recovering = event
                else:
                    number += 1
        finally:
            self._detach_reader()

    def _find(self, token_index: int) -> int:
        """Number of the event that begins with this token."""
        if token_index == 0 and self._num_dropped == 0:
            return 0
        at, number = self._dropped_tokens, self._num_dropped
        if token_index < at:
            raise InvalidArgument(
                "resume_token_index", f"{token_index} is no longer buffered; the first available index is {at}"
            )
        for event in self._log:
            if at >= token_index:
                break
            at, number = at + _num_tokens(event), number + 1
        if at != token_index:
            why = (
                f"only {at:,} tokens have been sent"
                if at < token_index
                else "is inside a delta; resume at its first token"
            )
            raise InvalidArgument("resume_token_index", f"{token_index}: {why}")
        return number

    async def _get(self, number: int, recovering: Recovering | None) -> Event | None:
        """The event of this number. Before that, a Recovering event, unless it is `recovering`, which the reader has.
        None after the last event."""
        while number >= self._num_dropped + len(self._log):
            if self._recovering is not None and self._recovering is not recovering:
                return self._recovering
            if self._is_over:
                return None
            if self._error is not None:
                raise self._error
            await self._advance()
        if number < self._num_dropped:
            raise Unavailable("another call continued reading this generation")
        return self._log[number - self._num_dropped]

    async def _advance(self) -> None:
        """Waits for the next event, once for all readers. The wait continues when this reader disconnects."""
        if self._step is None or self._step.done():
            self._step = asyncio.create_task(self._pull_event())
        await asyncio.wait([self._step])

    async def _pull_event(self) -> None:
        try:
            self._append_event(await anext(self._events))
        except StopAsyncIteration:
            self._is_over = True
        except Exception as error:
            self._error = self._error or error
            self._timer.cancel()
            self._on_timeout()  # a retry starts a new generation

    def _append_event(self, event: Event) -> None:
        self._recovering = event if isinstance(event, Recovering) else None
        if self._recovering is not None:
            return
        self._started = event if isinstance(event, Started) else self._started
        self._log.append(event)
        self._weight += _weight(event)
        while self._weight > MAX_WEIGHT and len(self._log) > 1:
            gone = self._log.popleft()
            self._num_dropped += 1
            self._dropped_tokens += _num_tokens(gone)
            self._weight -= _weight(gone)

    def _attach_reader(self) -> None:
        self._num_readers += 1
        self._timer.cancel()

    def _detach_reader(self) -> None:
        self._num_readers -= 1
        if self._num_readers == 0 and self._error is None:
            self._timer = self._call_later(self._seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        self._on_end(self)

    async def end(self, error: LongleafError) -> None:
        """Ends the generation; waiting readers get `error`."""
        self._error = self._error or error
        self._timer.cancel()
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._events.aclose()


def request_digest(request: Generate) -> bytes:
    """A digest of the input that is stable across processes. It replaces the input, which may be large, while the
    generation is held."""
    match request.input:
        case str(text):
            kind, requested = "text", text.encode()
        case Conversation(messages):
            kind, requested = "conversation", b"".join(map(_length_prefixed, messages))
        case token_ids:
            kind, requested = "ids", array("I", token_ids).tobytes()
    if request.tools or request.parse_answer:
        requested += msgspec.json.encode((request.tools, request.single_tool_call))
    if request.require_tool_call or request.required_tool:
        requested += b"call " + request.required_tool.encode()
    return blake3(f"{kind} {request.context}\n".encode()).update(requested).digest()


def _length_prefixed(message: Message) -> bytes:
    """The message, prefixed with its role and length, so that different conversations have different bytes."""
    text = message.text.encode()
    prefixed = f"{message.role} {len(text)}\n".encode() + text
    if not (message.reasoning or message.tool_calls or message.tool_call_id):
        return prefixed
    more = msgspec.json.encode((message.reasoning, message.tool_calls, message.tool_call_id))
    return prefixed + f"more {len(more)}\n".encode() + more


def _num_tokens(event: Event) -> int:
    return len(event.token_ids) if isinstance(event, Delta) else 0


def _weight(event: Event) -> int:
    attribution = event.attribution if isinstance(event, Delta | Finished) else None
    num_sources = len(attribution.sources) if attribution is not None else 0
    if not isinstance(event, Delta):
        return 1 + num_sources
    return _num_tokens(event) + sum(len(entry.top) for entry in event.logprobs) + num_sources


class ResumableGenerations:
    """The held generations, by id. `forget` is called with the id of a generation that can no longer be
    resumed."""

    def __init__(
        self,
        later: CallLater = call_later,
        forget: Callable[[str], None] = lambda _: None,
        max_resumable: int = MAX_RESUMABLE,
        tenant_share: float = 1.0,
    ) -> None:
        """There are at most `max_resumable`; each client and each tenant is limited to its share."""
        self._max_resumable, self._tenant_share = max_resumable, tenant_share
        self._call_later = later
        self._forget = forget
        self._by_id: dict[str, ResumableGeneration] = {}
        self._closing = TaskSet()

    def get(self, request_id: str) -> ResumableGeneration | None:
        return self._by_id.get(request_id)

    def find(self, request_id: str) -> ResumableGeneration:
        """Raises NotFound."""
        if request_id not in self._by_id:
            raise NotFound(f"generations/{request_id}")
        return self._by_id[request_id]

    def register(self, request_id: str, request: Generate, events: AsyncGenerator[Event, None]) -> ResumableGeneration:
        """Holds a new generation. Raises ResourceExhausted."""
        for share in shares_of(request.account, self._tenant_share):
            count = sum(share.is_theirs(replay.account) for replay in self._by_id.values())
            if count >= self._max_resumable * share.part:
                limit = f"its share of the limit of {self._max_resumable}"
                message = f"{share.owner_of} has {count} resumable generations, {limit}"
                raise ResourceExhausted("generations", message, RETRY_SECONDS)
        if len(self._by_id) >= self._max_resumable:
            raise ResourceExhausted(
                "generations", f"{self._max_resumable} resumable generations exist, which is the limit", RETRY_SECONDS
            )
        return self._add(request_id, request, request_digest(request), events)

    def restore(
        self,
        request_id: str,
        request: Generate,
        question: bytes,
        events: AsyncGenerator[Event, None],
        past_events: Iterable[Event],
    ) -> None:
        """Restores a generation of an earlier run of the service; `events` are the remaining ones."""
        self._add(request_id, request, question, events, past_events)

    def _add(
        self,
        request_id: str,
        request: Generate,
        question: bytes,
        events: AsyncGenerator[Event, None],
        past_events: Iterable[Event] = (),
    ) -> ResumableGeneration:
        replay = ResumableGeneration(
            request, question, events, self._call_later, partial(self._end, request_id), past_events
        )
        self._by_id[request_id] = replay
        return replay

    async def cancel(self, request_id: str) -> None:
        """Ends a generation and removes it. Raises NotFound."""
        replay = self.find(request_id)
        del self._by_id[request_id]
        self._forget(request_id)
        await replay.end(Cancelled(f"generations/{request_id} was cancelled"))

    def _end(self, request_id: str, replay: ResumableGeneration) -> None:
        """Ends and removes `replay`, unless it has been removed: the id may belong to another generation by now."""
        if self._by_id.get(request_id) is replay:
            del self._by_id[request_id]
            if not replay.is_cut_off:
                self._forget(request_id)
            self._closing.start(replay.end(NotFound(f"generations/{request_id}")))

"""The event stream that a client reads while its request runs."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from coordinator.engine_messages import Admitted, Ended, Event, Tokens
from longleaf.types import Progress, Recovering

MAX_UNREAD = 256
"""Unread tokens of a sample at which its request is paused; tokens of running steps are still added."""


MAX_UNREAD_BYTES = 8 << 20
"""Maximum bytes of unread attention attribution; above this the stream is paused."""


class Stream:
    """Events of one request, read by one task: Admitted, Progress, then the Tokens and Ended of all samples in order of
    arrival, then Recovering.

    A reader that keeps up gets the events unchanged. For another one, the stream holds at most one event of each kind
    and sample: progress is replaced, tokens are joined, and Recovering is dropped when the request continues. With many
    joined tokens, `is_full` is set; `on_read` is called when the reader has consumed them. An error is raised after
    previous events; the error of a sample is raised after the events of all samples.
    """

    def __init__(
        self,
        on_cancel: Callable[[], None],
        on_cancel_sample: Callable[[int], None],
        on_read: Callable[[], None],
    ) -> None:
        self._on_cancel = on_cancel
        self._on_cancel_sample = on_cancel_sample
        self._on_read = on_read
        self._changed = asyncio.Event()
        self._admitted: Admitted | None = None
        self._progress: Progress | None = None
        self._recovering: Recovering | None = None
        self._unread: dict[tuple[type[Tokens | Ended], int], Tokens | Ended] = {}
        """Events of samples by type and sample, the oldest first."""
        self._error: Exception | None = None
        self._is_closed = False
        self._failure: Exception | None = None

    @property
    def is_closed(self) -> bool:
        """No more events will be added."""
        return self._is_closed

    @property
    def is_full(self) -> bool:
        """The reader is behind: the request should pause."""
        return any(isinstance(unread, Tokens) and _is_large(unread) for unread in self._unread.values())

    def put(self, event: Event) -> None:
        if not isinstance(event, Admitted) or event.queue_position == 0:
            self._recovering = None
        match event:
            case Admitted():
                self._admitted = event
            case Recovering():
                self._recovering = event
            case Progress():
                self._progress = event
            case Tokens(sample=sample):
                previous = self._unread.get((Tokens, sample))
                self._unread[Tokens, sample] = previous.joined(event) if isinstance(previous, Tokens) else event
            case Ended(sample=sample):
                self._unread[Ended, sample] = event
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, which belongs to one of its samples, unless it ends with another error."""
        self._failure = self._failure or error

    def close(self, error: Exception | None = None) -> None:
        """Ends the stream, with an error or without, unless it has ended already."""
        if not self._is_closed:
            self._is_closed, self._error = True, error or self._failure
            self._changed.set()

    def cancel(self) -> None:
        """Ends the request and the stream; the request's resources are free within one step. Idempotent."""
        if not self._is_closed:
            self._on_cancel()
            self.close()

    def cancel_sample(self, sample: int) -> None:
        """Ends one sample without an Ended event; the last sample ends the stream. Idempotent."""
        if not self._is_closed:
            self._on_cancel_sample(sample)

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            if (event := self._pop_event()) is not None:
                return event
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    def _pop_event(self) -> Event | None:
        if self._admitted is not None:
            event, self._admitted = self._admitted, None
        elif self._progress is not None:
            event, self._progress = self._progress, None
        elif self._unread:
            was_full = self.is_full
            event = self._unread.pop(next(iter(self._unread)))
            if was_full and not self.is_full and not self._is_closed:
                self._on_read()
        else:
            event, self._recovering = self._recovering, None
        return event


def _is_large(unread: Tokens) -> bool:
    return len(unread.tokens) >= MAX_UNREAD or sum(each.num_bytes for each in unread.attention) >= MAX_UNREAD_BYTES

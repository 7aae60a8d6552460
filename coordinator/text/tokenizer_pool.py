"""The threads that tokenize texts, in short steps.

Tenants take turns, and the steps of one tenant run in the order of submission: a short text waits for one step of each
long text of its tenant and for as many steps of other tenants, never for a whole long text. Cancelled texts take no
further steps. Work that cannot be split into short steps has two separate threads: one for short texts, one for long
ones.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from coordinator.text.encoder import Encoder
from longleaf.errors import Unavailable

NUM_THREADS = 2
STEP_CHARACTERS = 1 << 16
"""Characters per step: a step takes tens of milliseconds, in which the library releases the GIL."""
LEAVE_SECONDS = 1.0
"""Maximum seconds to wait for running steps at the end. A longer step is abandoned; it does not block the exit."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TokenizerPool:
    """A small number of threads, started on demand. All callers share one event loop. `tenant` returns the tenant of
    the caller.
    """

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        *,
        leave_seconds: float = LEAVE_SECONDS,
        tenant: Callable[[], str] = lambda: "",
    ) -> None:
        self._num_threads = num_threads
        self._leave_seconds = leave_seconds
        self._tenant = tenant
        self._steps = _Steps()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._beside: dict[bool, TokenizerPool] = {}
        """Pools for slow calls, by whether the text is long."""

    async def encode(self, encoder: Encoder, text: str, after_step: Callable[[], None] = lambda: None) -> None:
        """Encode a whole text with `encoder`; `after_step` is called after each step, in its thread. Raises the errors
        of both.
        """
        await self.encode_all([(encoder, text)], after_step)

    async def encode_all(
        self, texts: Iterable[tuple[Encoder, str]], after_step: Callable[[], None] = lambda: None
    ) -> None:
        """As `encode`, for several texts with one encoder each: short texts share a step."""

        def take(step: list[_Piece]) -> None:
            for encoder, text, is_last in step:
                encoder.push(text)
                if is_last:
                    encoder.finish()
            after_step()

        for step in _in_steps(texts):
            await self.run(take, step)

    async def run_long(
        self,
        num_characters: int,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """As `run`, for a function that may take seconds for a text of `num_characters`. It delays no steps. Such calls
        wait for each other, but a call for a short text (at most STEP_CHARACTERS) never waits for one for a long text.
        """
        if self._is_closed:
            raise Unavailable("the service is stopping")
        is_long = num_characters > STEP_CHARACTERS
        if is_long not in self._beside:
            self._beside[is_long] = TokenizerPool(1, leave_seconds=self._leave_seconds, tenant=self._tenant)
        return await self._beside[is_long].run(function, *args, **kwargs)

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call a short function in a thread. If the caller is cancelled before the call has started, it never starts.

        Raises Unavailable at the end of the service, and the errors of the function.
        """
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        """Call a short function in a thread without waiting. Raises Unavailable at the end of the service."""
        if self._is_closed:
            raise Unavailable("the service is stopping")
        future: Future[Result] = Future()
        self._steps.put(_Step(future, partial(function, *args, **kwargs)), self._tenant())
        if len(self._threads) < self._num_threads:
            self._begin()
        return future

    def _begin(self) -> None:
        name = f"text-{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._steps,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    async def close(self) -> None:
        """Drop waiting steps, and wait briefly for running ones. Idempotent."""
        self._is_closed = True
        for threads in self._beside.values():
            await threads.close()
        for step in self._steps.close():
            step.drop()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(self._leave_seconds / self._num_threads)


class _Piece(NamedTuple):
    """Text for an encoder."""

    encoder: Encoder
    text: str
    is_last: bool


def _in_steps(texts: Iterable[tuple[Encoder, str]]) -> Iterator[list[_Piece]]:
    """Split the texts into steps."""
    step: list[_Piece] = []
    room = STEP_CHARACTERS
    for encoder, text in texts:
        start, end = 0, room
        while True:
            step.append(_Piece(encoder, text[start:end], end >= len(text)))
            room -= len(step[-1].text)
            if not room:
                yield step
                step, room = [], STEP_CHARACTERS
            if end >= len(text):
                break
            start, end = end, end + room
    if step:
        yield step


class _Step:
    """A call and its future."""

    def __init__(self, future: "Future[Any]", function: Callable[[], Any]) -> None:
        self._future = future
        self._function: Callable[[], Any] | None = function

    def call(self) -> None:
        future, function, self._function = self._future, self._function, None
        assert function is not None, "a step is called once"
        try:
            if future.set_running_or_notify_cancel():
                result, function = function(), None  # release the request before the result is published
                future.set_result(result)
        except BaseException as error:
            future.set_exception(error)
        finally:
            del self, future, function  # the error references this frame, which must not reference the error

    def drop(self) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(Unavailable("the service is stopping"))


class _Steps:
    """Waiting steps. Tenants take turns; the steps of one tenant run in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Step]] = {}
        """By tenant, in the order of their turns."""
        self._is_closed = False

    def put(self, step: _Step, tenant: str) -> None:
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(step)
            self._changed.notify()

    def get(self) -> _Step | None:
        """Wait for the next step; None after `close`."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            tenant = next(iter(self._waiting))
            steps = self._waiting.pop(tenant)
            step = steps.popleft()
            if steps:
                self._waiting[tenant] = steps  # behind all other tenants
            return step

    def close(self) -> list[_Step]:
        """Close the queue and return the waiting steps."""
        with self._changed:
            waiting = [step for steps in self._waiting.values() for step in steps]
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()
            return waiting


def _work(steps: _Steps) -> None:
    """Run steps until the queue is closed."""
    while (step := steps.get()) is not None:
        step.call()
        del step  # release its text while the thread is idle

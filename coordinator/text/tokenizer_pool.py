"""The threads in which texts become ids, in short steps.

The steps of all texts take turns, by tenant and then in the order in which they were asked for: a short text waits for
a step of each long one of its tenant, and as many of other tenants, never for a whole one. What nobody waits for any
more takes no further step. What cannot be done in short steps has two threads of its own: one for short texts, one for
long ones.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from longleaf.errors import Unavailable

NUM_THREADS = 2
STEP_CHARACTERS = 1 << 16
"""Text of a step: it takes tens of milliseconds, in which the library lets other threads run."""
LEAVE_SECONDS = 1.0
"""How long running steps are waited for at the end. One that takes longer is left behind: it holds no exit."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TextEncoder(Protocol):
    """What makes the ids of one text; see coordinator.text.encoder."""

    def push(self, text: str) -> None:
        """Takes the next piece."""
        ...

    def finish(self) -> None:
        """There is no further piece."""
        ...


class TokenizerPool:
    """Few threads, which begin with the first step. Those who ask for steps share one event loop. `tenant` names the
    tenant of who asks."""

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
        """For calls that take long: by whether the text is long."""

    async def encode(self, encoder: TextEncoder, text: str, after_step: Callable[[], None] = lambda: None) -> None:
        """Gives a text to `encoder`, all of it; `after_step` is called after each step, in its thread. Raises what both
        raise."""
        await self.encode_all([(encoder, text)], after_step)

    async def encode_all(
        self, texts: Iterable[tuple[TextEncoder, str]], after_step: Callable[[], None] = lambda: None
    ) -> None:
        """As `encode`, for texts with an encoder each: one step takes as many short ones as make a step's text."""

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
        """As `run`, for a function that may take seconds for a text of `num_characters`. No step waits for it; calls
        wait for each other, but none for a short text (at most STEP_CHARACTERS) waits for one for a long text."""
        if self._is_closed:
            raise Unavailable("the service is stopping")
        is_long = num_characters > STEP_CHARACTERS
        if is_long not in self._beside:
            self._beside[is_long] = TokenizerPool(1, leave_seconds=self._leave_seconds, tenant=self._tenant)
        return await self._beside[is_long].run(function, *args, **kwargs)

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Calls a short function in a thread. If the caller is cancelled before it has begun, it never will.

        Raises Unavailable at the end of the service, and what the function raises.
        """
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        """Calls a short function in a thread, and does not wait. Raises Unavailable at the end of the service."""
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
        """Drops what waits, and lets running steps end, if they do so soon. Idempotent."""
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

    encoder: TextEncoder
    text: str
    is_last: bool


def _in_steps(texts: Iterable[tuple[TextEncoder, str]]) -> Iterator[list[_Piece]]:
    """All that is to be done, cut into steps."""
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
    """A call, and what comes of it."""

    def __init__(self, future: "Future[Any]", function: Callable[[], Any]) -> None:
        self._future = future
        self._function: Callable[[], Any] | None = function

    def call(self) -> None:
        future, function, self._function = self._future, self._function, None
        assert function is not None, "a step is called once"
        try:
            if future.set_running_or_notify_cancel():
                result, function = function(), None  # whoever is told shall find the request let go of
                future.set_result(result)
        except BaseException as error:
            future.set_exception(error)
        finally:
            del self, future, function  # the error keeps this frame, which must not keep the error

    def drop(self) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(Unavailable("the service is stopping"))


class _Steps:
    """Steps that wait. Tenants take turns; those of one are called in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Step]] = {}
        """Of each tenant, the one whose turn it is first."""
        self._is_closed = False

    def put(self, step: _Step, tenant: str) -> None:
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(step)
            self._changed.notify()

    def get(self) -> _Step | None:
        """Waits for the next one; None once there will be no more."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            tenant = next(iter(self._waiting))
            steps = self._waiting.pop(tenant)
            step = steps.popleft()
            if steps:
                self._waiting[tenant] = steps  # behind all others
            return step

    def close(self) -> list[_Step]:
        """There will be no more. Gives those that wait."""
        with self._changed:
            waiting = [step for steps in self._waiting.values() for step in steps]
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()
            return waiting


def _work(steps: _Steps) -> None:
    """The life of a thread."""
    while (step := steps.get()) is not None:
        step.call()
        del step  # its text must not stay while there is nothing to do

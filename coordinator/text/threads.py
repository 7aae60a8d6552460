"""The threads in which texts become ids, in short steps.

The steps of all texts take turns, in the order in which they were asked for: a short text waits for a step of each long
one, never for a whole one. What nobody waits for any more takes no further step.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

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


class TextThreads:
    """Few threads, which begin with the first step. Those who ask for steps share one event loop."""

    def __init__(self, num_threads: int = NUM_THREADS, *, leave_seconds: float = LEAVE_SECONDS) -> None:
        self._num_threads = num_threads
        self._leave_seconds = leave_seconds
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    async def encode(self, encoder: TextEncoder, text: str, after_step: Callable[[], None] = lambda: None) -> None:
        """Gives a text to `encoder`, all of it; `after_step` is called after each step, in its thread. Raises what both
        raise."""

        def step(piece: str, is_last: bool) -> None:
            encoder.push(piece)
            if is_last:
                encoder.finish()
            after_step()

        for start in range(0, len(text) or 1, STEP_CHARACTERS):
            end = start + STEP_CHARACTERS
            await self.run(step, text[start:end], end >= len(text))

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
        self._steps.put(_Step(future, partial(function, *args, **kwargs)))
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
        with suppress(Empty):
            while (step := self._steps.get_nowait()) is not None:
                step.drop()
        for _ in self._threads:
            self._steps.put(None)
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(self._leave_seconds / self._num_threads)


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


def _work(steps: "SimpleQueue[_Step | None]") -> None:
    """The life of a thread."""
    while (step := steps.get()) is not None:
        step.call()
        del step  # its text must not stay while there is nothing to do

"""An event loop in a dedicated thread, for code without a loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from longleaf.errors import Cancelled

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], None]
CLOSED = "the client was closed, or belongs to the process that this one was forked from"
SIGNAL_SECONDS = 1.0
"""Maximum delay before a signal is handled. A signal that arrives just before a thread blocks does not interrupt the
thread, so blocking waits are limited to this time.
"""
STOP_SECONDS = 1.0
"""Longest wait for the tasks of grpc.aio that process the end of a call. A task that has not finished when the loop is
closed causes an error on another client's loop."""


class ThreadCall(Generic[T]):
    """A call on the loop, and the jobs that the waiting thread runs meanwhile."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._function = function
        self.task: asyncio.Task[T] | None = None
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        """The last item, None, is put when the task has ended."""
        self._ended = threading.Event()

    def next_job(self) -> Job | None:
        while True:
            with suppress(Empty):
                return self.jobs.get(timeout=SIGNAL_SECONDS)

    async def run(self) -> T:
        return await self._function()

    def set_ended(self) -> None:
        self._ended.set()
        self.jobs.put(None)

    def wait_ended(self) -> bool:
        """Waits up to SIGNAL_SECONDS and returns whether the call has ended. The None in `jobs` is not sufficient: an
        interrupt may strike after it was removed from the queue and before it is returned."""
        return self._ended.wait(SIGNAL_SECONDS)

    def cancel(self) -> None:
        """Must run on the loop, where every submitted call has a task by then. A call without one was not submitted."""
        if self.task is None:
            self.set_ended()
        else:
            self.task.cancel()


class LoopThread:
    """Runs coroutines for other threads, which wait for the results. Callbacks run in the waiting thread, never on the
    loop: they may make calls, block and raise."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._lock = threading.RLock()  # reentrant: garbage collection may close a stream, which is a call, at any time
        self._is_ending = False
        self._calls: dict[asyncio.Task[Any], ThreadCall[Any]] = {}
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it accepts work. False in a forked process, where the thread does not exist."""
        return self._thread.is_alive() and not self._is_ending

    def run(self, function: Callable[P, Coroutine[Any, Any, T]], *arguments: P.args, **options: P.kwargs) -> T:
        """The result of the coroutine function. If the caller is interrupted or a callback raises, the work is
        cancelled, and the exception propagates once the work has ended. Raises Cancelled if the loop ends before the
        work."""
        call = ThreadCall(partial(function, *arguments, **options))
        try:
            if self._submit(call):
                return self._result(call)
        except KeyboardInterrupt:  # may be raised between any two lines
            self._cancel_and_wait(call)
            raise
        raise Cancelled(CLOSED)

    def clean_up(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs cleanup that is unnecessary once the loop has ended. The garbage collector calls this on any thread,
        including the loop's."""
        if self._is_loop_thread():
            self._start(ThreadCall(function))
        elif self.is_open:
            with suppress(Cancelled):
                self.run(function)

    async def notify(self, callback: Callable[[T], None], updates: T) -> None:
        """Makes the thread that waits for the running task call `callback`. Does nothing in background tasks."""
        task = asyncio.current_task()
        if task is None or task not in self._calls:
            return
        call, notified = self._calls[task], asyncio.Event()

        def job() -> None:
            callback(updates)
            self._call_on_loop(notified.set)

        call.jobs.put(job)
        await notified.wait()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Refuses new work, runs `last`, cancels the remaining calls and ends the thread. Idempotent. Does nothing in a
        forked process, which must not touch state shared with its parent."""
        call = ThreadCall(partial(self._shut_down, last))
        if not self._submit(call, is_last=True):
            return
        try:
            self._result(call)
        finally:
            self._call_on_loop(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut_down(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await last()
        me = asyncio.current_task()
        await _cancelled(set(self._calls) - {me})
        if left := asyncio.all_tasks() - {me}:
            await asyncio.wait(left, timeout=STOP_SECONDS)
        await _cancelled(asyncio.all_tasks() - {me})
        await self._loop.shutdown_asyncgens()

    def _submit(self, call: ThreadCall[Any], *, is_last: bool = False) -> bool:
        """Submits the call and returns whether it will start. No call starts after one with `is_last`."""
        if self._is_loop_thread():
            raise RuntimeError("a client cannot be called on its own event loop, which would wait for itself")
        if self._thread.is_alive():
            with self._lock:
                if not self._is_ending:
                    self._is_ending = is_last
                    self._loop.call_soon_threadsafe(self._start, call)
                    return True
        return False

    def _start(self, call: ThreadCall[Any]) -> None:
        call.task = self._loop.create_task(call.run())
        self._calls[call.task] = call
        call.task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._calls.pop(task).set_ended()

    def _result(self, call: ThreadCall[T]) -> T:
        try:
            while (job := call.next_job()) is not None:
                job()
        except BaseException:
            self._cancel_and_wait(call)
            raise
        assert call.task is not None
        try:
            return call.task.result()
        except asyncio.CancelledError:
            raise Cancelled(CLOSED) from None

    def _cancel_and_wait(self, call: ThreadCall[Any]) -> None:
        """Cancels a call, started or not, and waits for its end."""
        self._call_on_loop(call.cancel)
        while not call.wait_ended() and self._thread.is_alive():
            pass

    def _call_on_loop(self, job: Job) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no thread waits for a call
            self._loop.call_soon_threadsafe(job)

    def _is_loop_thread(self) -> bool:
        return threading.current_thread() is self._thread  # not compared by ident, which may be reused


async def _cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancels the tasks and waits for their end."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)

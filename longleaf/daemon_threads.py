"""Blocking calls in daemon threads. Process exit waits for the threads of an executor, but not for these."""

import _thread
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def call_in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Calls `function` in a new thread, unless the future is cancelled before the thread runs. Raises RuntimeError if
    no thread can be started.

    A thread that lacks memory for its first call ends without a trace, and its future stays pending: it can be
    cancelled. `threading.Thread.start` would wait for such a thread forever.
    """
    future = Future[Result]()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    _thread.start_new_thread(work, ())
    return future

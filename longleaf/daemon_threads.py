"""Blocking calls in daemon threads. Process exit waits for the threads of an executor, but not for these."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def call_in_thread(function: Callable[[], Result], name: str) -> Future[Result]:
    """Calls `function` in a new thread of this name, unless the future is cancelled before the thread runs. Raises
    RuntimeError if no thread can be started."""
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

    Thread(target=work, name=name, daemon=True).start()
    return future

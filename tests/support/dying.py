"""Work in child processes that are killed before each of their calls to the system, one after the other."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

CALLS = ("mkdir", "open", "write", "fsync", "close", "link", "replace", "unlink", "rmdir")


def killed_at_each_call(work: Callable[[int], Any]) -> Iterator[int]:
    """Calls `work(number)` in a child that is killed before its call `number`; yields each number after the child's
    death, until a child comes to its end."""
    number = 0
    while not _is_complete(work, number):
        yield number
        number += 1


def _is_complete(work: Callable[[int], Any], number: int) -> bool:
    child = os.fork()
    if not child:
        status = 1
        try:
            _kill_before(number)
            work(number)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code == 0


def _kill_before(number: int) -> None:
    """Puts a point around each of CALLS; only this child has them."""
    left = [number]

    def pointed(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **options: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **options)

        return calling

    for name in CALLS:
        setattr(os, name, pointed(getattr(os, name)))

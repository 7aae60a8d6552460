"""Calls in daemon threads."""

import _thread
import threading
from collections.abc import Callable

import pytest

from longleaf.daemon_threads import call_in_thread
from longleaf.storage.timed_calls import MAX_HANGING, StorageTimeout, TimedCalls

pytestmark = pytest.mark.timeout(60)


def test_call_runs_in_a_daemon_thread() -> None:
    thread = call_in_thread(threading.current_thread).result()
    assert thread is not threading.current_thread()
    assert thread.daemon


def die_at_once(_function: Callable[[], object], _arguments: tuple[object, ...]) -> None:
    """Starts a thread that has no memory for its first call."""


def test_thread_without_memory_for_its_first_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((_thread, "start_new_thread"), (threading, "_start_new_thread")):
        monkeypatch.setattr(module, name, die_at_once)
    future = call_in_thread(lambda: 7)
    assert not future.done()
    assert future.cancel()


def test_threads_without_memory_do_not_count_as_hanging_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = TimedCalls(0)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", die_at_once)
        for _ in range(2 * MAX_HANGING):
            with pytest.raises(StorageTimeout, match="no answer within"):
                calls.end(calls.begin(lambda: 7))
    assert calls.begin(lambda: 7).future.result() == 7


def test_error_of_the_call_is_that_of_the_future() -> None:
    assert isinstance(call_in_thread(lambda: 1 // 0).exception(), ZeroDivisionError)


def test_call_that_is_cancelled_before_its_thread_runs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, calls = list[Callable[[], None]](), list[int]()
    monkeypatch.setattr(_thread, "start_new_thread", lambda work, _: threads.append(work))
    future = call_in_thread(lambda: calls.append(1))
    assert future.cancel()
    threads[0]()
    assert not calls


def test_running_call_is_not_cancelled() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        may_end.wait()
        return 7

    future = call_in_thread(work)
    begun.wait()
    assert not future.cancel()
    may_end.set()
    assert future.result() == 7

"""Calls in daemon threads."""

import threading

import pytest

from longleaf.daemon_threads import call_in_thread

pytestmark = pytest.mark.timeout(60)


def test_call_runs_in_a_daemon_thread_of_that_name() -> None:
    thread = call_in_thread(threading.current_thread, "reader").result()
    assert (thread.name, thread.daemon) == ("reader", True)


def test_error_of_the_call_is_that_of_the_future() -> None:
    assert isinstance(call_in_thread(lambda: 1 // 0, "reader").exception(), ZeroDivisionError)


def test_call_that_is_cancelled_before_its_thread_runs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, calls = list[threading.Thread](), list[int]()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
    future = call_in_thread(lambda: calls.append(1), "reader")
    assert future.cancel()
    threads[0].run()
    assert not calls


def test_running_call_is_not_cancelled() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        may_end.wait()
        return 7

    future = call_in_thread(work, "reader")
    begun.wait()
    assert not future.cancel()
    may_end.set()
    assert future.result() == 7

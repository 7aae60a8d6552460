"""The order of storage requests: fetches before saves, and saves after their pause."""

import threading

import pytest

from workers.kv_io.io_queue import IoQueue

SECONDS = 30


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def work(name):
    def done():
        """A request without effect; tests check only the order."""

    done.__name__ = name
    return done


def taken(orders):
    """The name of the next request, from a separate thread that waits if there is none."""
    found = []
    thread = threading.Thread(target=lambda: found.append(orders.take()), daemon=True)
    thread.start()
    return thread, found


@pytest.fixture
def clock():
    return Clock()


def test_fetches_precede_saves(clock):
    orders = IoQueue(clock)
    for name in ("save 1", "save 2"):
        orders.put_save(work(name))
    for name in ("fetch 1", "fetch 2"):
        orders.put_fetch(work(name))
    assert [orders.take().__name__ for _ in range(4)] == ["fetch 1", "fetch 2", "save 1", "save 2"]


def test_pause_delays_saves_but_not_fetches(clock):
    orders = IoQueue(clock)
    orders.put_save(work("save"))
    orders.rest(3600.0)
    thread, found = taken(orders)
    orders.put_fetch(work("fetch"))
    thread.join(SECONDS)
    assert [one.__name__ for one in found] == ["fetch"]
    clock.now += 3600.0
    assert orders.take().__name__ == "save"


def test_running_save_delays_other_saves(clock):
    orders = IoQueue(clock, lambda: 5.0)
    for name in ("save 1", "save 2"):
        orders.put_save(work(name))
    assert orders.take().__name__ == "save 1"
    thread, found = taken(orders)
    orders.put_fetch(work("fetch"))
    thread.join(SECONDS)
    assert [one.__name__ for one in found] == ["fetch"]
    clock.now += 5.0
    assert orders.take().__name__ == "save 2"


def test_last_pause_counts(clock):
    """A thread that waits for the end of a long pause is notified of a shorter one."""
    orders = IoQueue(clock)
    orders.put_save(work("save"))
    orders.rest(3600.0)
    thread, found = taken(orders)
    orders.rest(0.0)
    thread.join(SECONDS)
    assert [one.__name__ for one in found] == ["save"]


def test_pause_ends_after_its_time():
    orders = IoQueue()
    orders.rest(0.05)
    orders.put_save(work("save"))
    assert orders.take().__name__ == "save"


def test_waiting_requests_are_dropped_on_close(clock):
    orders = IoQueue(clock)
    waiting = [taken(orders) for _ in range(2)]
    orders.close()
    orders.close()
    for thread, _ in waiting:
        thread.join(SECONDS)
    assert [found for _, found in waiting] == [[None], [None]]
    orders.put_fetch(work("fetch"))
    assert orders.take() is None

"""Fixtures that several folders of tests share."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from longleaf.errors import StartError
from tests.sampling import sample, values_of

RAY_SLOTS = 3
PRELOAD = ["tests.support.preload"]
"""Modules that processes of tests find imported, in the one that they are forked from."""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of all processes that tests start
multiprocessing.set_forkserver_preload(PRELOAD)
pytest.register_assert_rewrite("tests.support")
# The same examples in every run: a change is judged by itself, and not by the luck of its run.
settings.register_profile("shared machine", deadline=None, derandomize=True)
settings.load_profile("shared machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `extended` the cases of tests marked `sampled` that `make test` leaves to `make test-all`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, ("slow", "bench", "extended"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in cases.values():
        (count,) = members[0].get_closest_marker("sampled").args
        kept = sample([values_of(item) for item in members], count)
        for number, item in enumerate(members):
            if number not in kept:
                item.add_marker(pytest.mark.extended)


def pytest_sessionstart() -> None:
    """What tests are collected from stays: nobody needs to look for garbage among it, now or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """What is started in the background of a shell without job control ignores interrupts, and so do its children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[int]:
    """One Ray for the whole run, started as the service starts it; gives the number of its slots."""
    from coordinator.ranks.ray_connection import connect

    try:
        connection = connect(None, RAY_SLOTS)
    except StartError:  # it gives itself 30 seconds, which a loaded machine may not have
        connection = connect(None, RAY_SLOTS)
    yield RAY_SLOTS
    connection.close()

"""Fixtures that several folders of tests share."""

import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import cache

import httpcore2
import pytest
from hypothesis import Phase, settings

from tests.sampling import parameter_values, sample

RAY_SLOTS = 3
MAX_TEMP_PATH_BYTES = 75
"""Multiprocessing appends 32 bytes, and the path of a Unix socket has at most 107."""
PRELOAD = ["tests.support.preload"]
"""Modules preloaded in the fork server of tests."""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by test processes
multiprocessing.set_forkserver_preload(PRELOAD)
pytest.register_assert_rewrite("tests.support")
# Each HTTP client would read the certificates of the machine, 20 ms of processor time, and nearly all use plain HTTP.
httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)
# Deterministic examples: a failure is caused by the change. It is reported at once, because shrinking an example that
# runs a service takes longer than a test may: HYPOTHESIS_PROFILE=shrink shrinks it. HYPOTHESIS_PROFILE=random draws
# others in every run, twice as many where a test does not set the number.
_NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("shrink", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("deterministic", settings.get_profile("shrink"), phases=_NO_SHRINKING)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))
if len(os.fsencode(tempfile.gettempdir())) > MAX_TEMP_PATH_BYTES:  # multiprocessing makes sockets there
    multiprocessing.current_process()._config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as `extended` the cases of tests marked `sampled` that `make test` leaves to `make test-extended`, unless
    tests are selected by name."""
    if any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, ("slow", "bench", "extended"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in cases.values():
        (count,) = members[0].get_closest_marker("sampled").args
        retained = sample([parameter_values(item) for item in members], count)
        for number, item in enumerate(members):
            if number not in retained:
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
    from coordinator.cluster.ray_connection import connect

    connection = connect(None, RAY_SLOTS)
    yield RAY_SLOTS
    connection.close()

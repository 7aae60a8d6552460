"""Small checkpoints and what transformers' own `generate` says about them."""

import fcntl
import os
import pickle
from collections.abc import Callable

import pytest

from tests.support.golden.plain import Golden, make_golden
from zoo.families import Family


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Golden]:
    """Golden answers by family, made at first use by whichever process of the run comes first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the whole run
    folder = folder / "goldens"
    folder.mkdir(exist_ok=True)
    made: dict[Family, Golden] = {}

    def get(family: Family) -> Golden:
        if family not in made:
            made[family] = find(family)
        return made[family]

    def find(family: Family) -> Golden:
        told = folder / f"{family}.pickle"
        with (folder / f"{family}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not told.exists():
                told.write_bytes(pickle.dumps(make_golden(folder / family, family)))
        return pickle.loads(told.read_bytes())

    return get

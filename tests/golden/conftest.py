"""Small checkpoints and the output of transformers' own `generate` for them."""

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator

import pytest

from tests.support.golden.loaded_models import loaded_once
from tests.support.golden.plain import Golden, make_golden
from workers.model import model as models
from zoo.checkpoints import PAD_IDS
from zoo.families import Family

LOAD = loaded_once(models.load)


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Golden]:
    """Golden answers by family and padding id, made at first use by whichever process of the run comes first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the whole run
    folder = folder / "goldens"
    folder.mkdir(exist_ok=True)
    made: dict[tuple[Family, int], Golden] = {}

    def get(family: Family, pad_token_id: int = PAD_IDS[0]) -> Golden:
        if (family, pad_token_id) not in made:
            made[family, pad_token_id] = find(family, pad_token_id)
        return made[family, pad_token_id]

    def find(family: Family, pad_token_id: int) -> Golden:
        name = family if pad_token_id == PAD_IDS[0] else f"{family}-pad{pad_token_id}"
        path = folder / f"{name}.pickle"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(make_golden(folder / name, family, pad_token_id)))
        return pickle.loads(path.read_bytes())

    return get


@pytest.fixture(autouse=True)
def copied_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks in threads load each checkpoint once, except in tests that patch functions, which a load may call."""
    if "monkeypatch" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", LOAD)
        yield

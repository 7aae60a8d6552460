"""The launcher, ranks and threads that `serve` chooses."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from longleaf import rank_choice
from longleaf.config import CHOSEN, EngineConfig
from longleaf.rank_choice import Machine, choose_ranks, this_machine
from longleaf.resources import num_processors
from longleaf.service_settings import ServiceConfig


def chosen(machine: Machine, *, ranks: int = CHOSEN, threads: int = CHOSEN, device="auto", **service: object):
    """Launcher, ranks and threads."""
    engine = EngineConfig(world_size=ranks, threads_per_rank=threads, device=device)
    found = choose_ranks(ServiceConfig(engine=engine, **service), machine)  # type: ignore[arg-type]
    return found.launcher, found.engine.world_size, found.engine.threads_per_rank


@pytest.mark.parametrize(
    ("machine", "given", "expected"),
    [
        (Machine(16, 0), {}, ("local", 1, 16)),
        (Machine(16, 0), {"ranks": 4}, ("local", 4, 4)),
        (Machine(16, 0), {"ranks": 5}, ("local", 5, 3)),
        (Machine(2, 0), {"ranks": 4}, ("local", 4, 1)),
        (Machine(16, 0), {"threads": 3}, ("local", 1, 3)),
        (Machine(16, 0, 2), {}, ("local", 1, 2)),
        (Machine(16, 0, 2), {"ranks": 4}, ("local", 4, 2)),
        (Machine(16, 0, 5000), {}, ("local", 1, 1024)),
        (Machine(16, 0, 8), {"ray_address": "auto"}, ("ray", 1, 1)),
        (Machine(16, 2, 8), {}, ("local", 2, 1)),
        (Machine(16, 0, 2), {"threads": 3}, ("local", 1, 3)),
        (Machine(16, 0), {"launcher": "ray"}, ("ray", 1, 16)),
        (Machine(16, 0), {"ray_address": "auto"}, ("ray", 1, 1)),
        (Machine(16, 0), {"ray_address": "auto", "ranks": 8, "threads": 4}, ("ray", 8, 4)),
        (Machine(16, 0), {"wait_for_ranks": 10.0}, ("ray", 1, 16)),
        (Machine(16, 0), {"wait_for_ranks": 10.0, "launcher": "local"}, ("local", 1, 16)),
        (Machine(64, 8), {}, ("local", 8, 1)),
        (Machine(64, 8), {"ranks": 2}, ("local", 2, 1)),
        (Machine(64, 8), {"device": "cpu"}, ("local", 1, 64)),
        (Machine(64, 8), {"ray_address": "auto"}, ("ray", 1, 1)),
    ],
)
def test_what_is_not_given_suits_the_machine(
    machine: Machine, given: dict[str, object], expected: tuple[str, int, int]
) -> None:
    assert chosen(machine, **given) == expected  # type: ignore[arg-type]


def test_choice_is_final() -> None:
    config = choose_ranks(ServiceConfig(engine=EngineConfig(world_size=CHOSEN, threads_per_rank=CHOSEN)), Machine(4, 2))
    assert choose_ranks(config, Machine(99, 9)) == config


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("0", None), ("3,2", None), ("", None)])
def test_omp_num_threads_is_the_limit_of_this_machine(
    value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    found = this_machine()
    assert (found.num_processors, found.omp_threads) == (num_processors(), threads)


@pytest.mark.parametrize(
    ("version", "number"), [("cuda: Optional[str] = None\nhip = None\n", 0), ("cuda = '12.8'\nhip = None\n", 3)]
)
def test_gpus_count_only_if_torch_was_built_for_them(
    version: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(version)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(rank_choice, "find_spec", {"torch": spec}.get)
    monkeypatch.setattr(rank_choice, "num_gpus", lambda: 3)
    assert this_machine().num_gpus == number

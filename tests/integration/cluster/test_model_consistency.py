"""Real ranks on simulated nodes with separate model folders: all models are equal, or no rank starts."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.actor import CoordinatorActor
from coordinator.cluster.local_fleet import LocalFleet
from longleaf.config import EngineConfig, embedded_model
from longleaf.fingerprint import SINGLE
from longleaf.launch import BAD_INPUT
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.service_settings import ServiceConfig
from tests.support.running import WatchedFleet
from workers.__main__ import main

pytestmark = pytest.mark.timeout(120)


class OnNodes:
    """Entry point of a rank on a separate node, with the model in the folder of this number."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def __call__(self, spec: RankSpec) -> None:
        config = replace(spec.config, model=str(self._folders[spec.member]))
        main(replace(spec, config=config, node=f"node-{spec.member}", num_ranks_here=1, is_first_here=True))


def damaged(folder: Path) -> None:
    with (folder / SINGLE).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def configured(folder: Path) -> None:
    """The model cannot even load."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another": (damaged, f"has a different {SINGLE} than node node-0 (127.0.0.1)"),
    "another config": (configured, "has a different config.json than node node-0 (127.0.0.1)"),
    "missing": (shutil.rmtree, ": model folder {folder} does not exist"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
async def test_node_with_a_different_model_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], object], expected: str
) -> None:
    shutil.copytree(embedded_model(), tmp_path / "other")
    change(tmp_path / "other")
    fleet = WatchedFleet(OnNodes([embedded_model(), tmp_path / "other"]))
    config = EngineConfig(model=str(embedded_model()), world_size=2, kv_bytes=1 << 20)
    actor = CoordinatorActor(ServiceConfig(engine=config, port=0, launcher="local"), lambda: fleet)
    reply = await actor.start()
    message = expected.format(folder=tmp_path / "other")
    separator = "" if message.startswith(":") else " "
    assert reply.error == f"model: node node-1 (127.0.0.1){separator}{message}"
    assert reply.exit_code == BAD_INPUT
    assert len(fleet.children) == 2
    assert not [process for process in fleet.children if process.is_running()]


async def test_copies_of_a_model_are_equal(tmp_path: Path) -> None:
    shutil.copytree(embedded_model(), tmp_path / "copy")
    config = EngineConfig(model=str(embedded_model()), world_size=2, kv_bytes=1 << 20)
    make_fleet = partial(LocalFleet, OnNodes([embedded_model(), tmp_path / "copy"]))
    actor = CoordinatorActor(ServiceConfig(engine=config, port=0, launcher="local"), make_fleet)
    try:
        reply = await actor.start()
        assert (reply.error, reply.port > 0) == ("", True)
    finally:
        await actor.stop()

"""Ray on two hosts: errors name the node or the option, and benchmarks measure between the hosts."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from longleaf.merge import MERGES
from tests.support.command_line import CLI
from tests.support.network.ray_nodes import SLOTS, TOKEN, RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.timeout(600)]


def refused(nodes: RayNodes, model: Path, *options: str, token: str = TOKEN) -> str:
    """Last output of a service that cannot start and leaves nothing."""
    own = ["--model", str(model), "--ray-address", nodes.address, "--kv-bytes", "8000000", *options]
    command = [*nodes.on(0, token), *CLI, "serve", "--port", "0", *own]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert "Traceback" not in found.stderr
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert errors == found.stderr.splitlines()[-1:]
    assert psutil.wait_procs(nodes.service(), timeout=60)[1] == []
    return errors[0].removeprefix("error: ")


def test_missing_slots_are_reported(nodes: RayNodes, checkpoint: Path) -> None:
    message = refused(nodes, checkpoint, "--world-size", "5", "--wait-for-ranks", "1")
    assert message == "world size 5 needs 5 slots, the cluster has 4, and --wait-for-ranks has passed"


@pytest.mark.parametrize(("token", "why"), [("", "no token was found"), ("another", "it rejects the token")])
def test_missing_or_wrong_token_is_reported(nodes: RayNodes, checkpoint: Path, token: str, why: str) -> None:
    """All token errors: test_ray_tokens."""
    message = refused(nodes, checkpoint, token=token)
    assert message.startswith(f"--ray-address: the Ray cluster at {nodes.address} cannot be joined: ")
    assert why in message
    assert message.endswith("RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH")


def another(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


MODELS: list[tuple[Callable[[Path], object], str]] = [
    (another, " has a different tokenizer.json than node "),
    (shutil.rmtree, ": model folder {folder} does not exist"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "expected"), MODELS, ids=["another", "missing"])
def test_host_with_a_different_model_is_refused_by_name(
    nodes: RayNodes, checkpoint: Path, change: Callable[[Path], object], expected: str
) -> None:
    """Both nodes use the same path with different contents, as on separate disks."""
    folders = [folder / change.__name__ for folder in (nodes.shared, nodes.apart)]
    for folder in folders:
        shutil.copytree(checkpoint, folder)
    change(folders[1])
    message = refused(nodes, folders[0], "--world-size", str(SLOTS + 1))
    assert message.startswith("model: node ")
    assert f"({nodes.network.addresses[1]}){expected.format(folder=folders[0])}" in message


def measure(nodes: RayNodes, name: str, *options: str) -> list[dict]:
    """The rows of a benchmark on three ranks."""
    command = [*nodes.on(0), sys.executable, "-m", f"bench.{name}", "--ray-address", nodes.address, "--json"]
    command += ["--world-size", str(SLOTS + 1), *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_merge_benchmark_measures_between_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    rows = measure(nodes, "merge", "--batch", "1", "--repeats", "2", "--out", str(tmp_path))
    assert {row["nodes"] for row in rows} == {2}
    merges = {(row["transport"], row["merge"]) for row in rows}
    assert merges == {*(("gloo", name) for name in MERGES), ("shared_memory", "hierarchy")}


@pytest.mark.slow
def test_attention_benchmark_measures_between_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    rows = measure(nodes, "attention", "--length", "4096", "--repeats", "2", "--out", str(tmp_path))
    trees = {(row["transport"], row["nodes"]) for row in rows if row["method"] == "tree"}
    assert trees == {("gloo", 2), ("shared_memory", 2)}
    others = {(row["method"], row["world_size"], row["nodes"]) for row in rows if row["method"] != "tree"}
    assert others == {("one_device", 1, 1), *((method, SLOTS + 1, 2) for method in ("paper", "ring", "ring_pass_q"))}
    assert all(row["bytes_between_hosts"] > 0 for row in rows if row["nodes"] == 2)

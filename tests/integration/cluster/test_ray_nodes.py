"""A node of a Ray cluster dies with all its processes, and another one replaces it."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.support.command_line import end

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
RAY = str(Path(sys.executable).with_name("ray"))
HERE = "127.0.0.1"
SERVICE = """
import asyncio, sys
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.replacement_supervisor import ReplacementSupervisor
from coordinator.cluster.ports import ReplacementDelayed
from coordinator.cluster.ray_connection import connect
from coordinator.cluster.ray_fleet import RayFleet
from longleaf.config import EngineConfig
from tests.support.members import MemberActor

async def main():
    config, fleet = EngineConfig(model="none", world_size=3, heartbeat_timeout=60.0), RayFleet(MemberActor)
    host = await fleet.reserve(config, 60.0)
    control = RankManager(config, host, fleet.kill, fleet.location_of)
    delays = asyncio.Queue()
    def on_event(event):
        if isinstance(event, ReplacementDelayed):
            delays.put_nowait(event)

    control.registry.subscribe(on_event)
    await fleet.launch(config, control.invitations, control.on_process_exit)
    formation = await control.start(1)
    supervisor = ReplacementSupervisor(control.registry, fleet, config, formation.readies)
    print("started", [hello.pid for hello in formation.hellos], flush=True)
    loss = await control.group.wait_ended()
    print("loss:", loss.error.rank, (await control.form(2)).members, flush=True)
    print("delayed:", (await delays.get()).reason, flush=True)
    await control.wait_joinable()
    print("formed", len((await control.form(3)).members), flush=True)
    await supervisor.close()
    await control.close()
    await fleet.shutdown()

connection = connect(sys.argv[1], 3, 60.0)
asyncio.run(main())
connection.close()
"""


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(started: ExitStack, command: list[str], first: str) -> tuple[subprocess.Popen[str], str]:
    """A process that has printed a line with `first`, and that line."""
    root = str(Path(__file__).parents[3])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": os.environ | {"PYTHONPATH": root}}
    process: subprocess.Popen[str] = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    started.callback(end, process)
    return process, read_to(process, first)


def read_to(process: subprocess.Popen[str], text: str) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError("".join(lines))


def test_slot_of_a_dead_node_is_filled_on_a_new_node(
    started: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)  # the Ray of an earlier test has released its resources
    folder = tempfile.mkdtemp(prefix="ll-", dir="/tmp")
    started.callback(shutil.rmtree, folder, ignore_errors=True)
    with socket.create_server((HERE, 0)) as free:
        address = f"{HERE}:{free.getsockname()[1]}"
    node = [RAY, "start", "--object-store-memory", "80000000", "--block", "--node-ip-address", HERE]
    head = ["--include-dashboard=false", "--head", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}"]
    start(started, [*node, "--num-cpus=2", *head], "Ray runtime started")
    other = [*node, "--num-cpus=1", "--address", address]
    second, _ = start(started, other, "Ray runtime started")
    (script := tmp_path / "service.py").write_text(SERVICE)
    service, reported = start(started, [sys.executable, str(script), address], "started")
    pids = [int(pid) for pid in reported.partition("[")[2].strip(" ]\n").split(",")]
    below = psutil.Process(second.pid).children(recursive=True)
    lost = [member for member, pid in enumerate(pids) if pid in {process.pid for process in below}]
    assert len(lost) == 1
    for process in [psutil.Process(second.pid), *below]:
        process.kill()
    left = tuple(member for member in range(3) if member not in lost)
    assert read_to(service, "loss:") == f"loss: {lost[0]} {left}\n"
    assert "the slot's node left the cluster" in read_to(service, "delayed:")
    start(started, other, "Ray runtime started")
    assert read_to(service, "formed") == "formed 3\n"
    assert service.wait(timeout=60) == 0

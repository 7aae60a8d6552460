"""A service whose Ray cluster is incomplete waits, reports that, and starts with the last slot."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from longleaf.client import Client
from longleaf.errors import Unavailable
from tests.support.command_line import CLI, end

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
RAY = str(Path(sys.executable).with_name("ray"))
HERE = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HERE, 0))).getsockname()[1] for _ in range(count)]


def start(started: ExitStack, command: list[str], first: str) -> tuple[subprocess.Popen, list[str]]:
    """A process that has printed a line with `first`, and its output so far."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    started.callback(end, process)
    return process, read_to(process, first)


def read_to(process: subprocess.Popen, text: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def test_service_waits_for_the_cluster_and_its_last_slot(
    checkpoint: Path, started: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)  # the Ray of an earlier test has released its resources
    folder = tempfile.mkdtemp(prefix="ll-", dir="/tmp")
    started.callback(shutil.rmtree, folder, ignore_errors=True)
    ray_port, port = free_ports(2)
    address = f"{HERE}:{ray_port}"
    options = ["--port", str(port), "--model", str(checkpoint), "--world-size", "2", "--kv-bytes", "8000000"]
    options += ["--ray-address", address, "--wait-for-ranks", "200", "--json"]
    service, _ = start(started, [*CLI, "serve", *options], f'{{"waiting_for":"the Ray cluster at {address}"')
    node = [RAY, "start", "--num-cpus", "1", "--object-store-memory", "80000000", "--block"]
    node += ["--node-ip-address", HERE, "--include-dashboard=false"]
    start(started, [*node, "--head", f"--port={ray_port}", f"--temp-dir={folder}"], "Ray runtime started")
    output = read_to(service, '"waiting_for":"1 of 2 slots"')
    assert '"num_missing":1,"world_size":2' in output[-1]
    with Client(f"{HERE}:{port}", retries=0) as client:
        assert (client.is_healthy(), client.is_healthy("liveness")) == (False, True)
        with pytest.raises(Unavailable, match="^loading, 0 of 2 ranks ready, 1 of their slots missing$"):
            client.cluster()
        start(started, [*node[:-1], "--address", address], "Ray runtime started")
        read_to(service, '{"address":')
        assert client.is_healthy()
        assert client.cluster().world_size == 2
        assert client.drain().open_calls == 0
    assert service.wait(timeout=60) == 0

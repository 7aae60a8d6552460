"""Ray on two hosts, which are network namespaces of this machine: the ranks find each other without being told how."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.harness.hosts import Network
from longleaf.config import join_address
from tests.support.command_line import Served, end
from tests.support.network.namespaces import two_hosts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

RAY = str(Path(sys.executable).with_name("ray"))
SLOTS = 2
"""Of each host."""
PORT = 6379


@pytest.fixture(params=[4, 6])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with two_hosts(request.param) as network:
        yield network


def on(network: Network, host: int) -> tuple[str, ...]:
    """Goes before a command that is to run on a host."""
    return ("ip", "netns", "exec", network.namespaces[host])


def start_node(network: Network, host: int, started: ExitStack, *options: str) -> None:
    """A Ray node that is ready."""
    own = ("--node-ip-address", network.addresses[host], "--num-cpus", str(SLOTS))
    command = [*on(network, host), RAY, "start", *own, "--object-store-memory", "80000000", "--block", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    started.callback(end, process)
    output = ""
    for line in process.stdout:
        output += line
        if "Ray runtime started" in line:
            return
    raise AssertionError(output)


def answer(service: Served, document: Path) -> str:
    """What the model says to a question about a document."""
    service.json("ingest", str(document), "--name", "book")
    return service.run("ask", "book", "Who?", "--max-tokens", "24", "--temperature", "0").stdout


def test_two_ranks_on_each_of_two_hosts_answer_like_one(
    checkpoint: Path, tmp_path: Path, network: Network, started: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *(name for name in os.environ if name.startswith("RAY_"))):
        monkeypatch.delenv(name, raising=False)  # a Ray that another test started has left what it needs
    for name, value in {"MODE": "token", "TOKEN": "a token of the cluster"}.items():
        monkeypatch.setenv(f"RAY_AUTH_{name}", value)
    # a short path: the sockets of Ray lie in it, and their names have a limit
    folder = tempfile.mkdtemp(prefix="ll-", dir="/tmp")
    started.callback(shutil.rmtree, folder, ignore_errors=True)
    (document := tmp_path / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long. " * 40)
    options = ("--model", str(checkpoint), "--kv-bytes", "8000000")
    with Served(*options, "--launcher", "local") as alone:
        expected = answer(alone, document)
    address = join_address(network.addresses[0], PORT)
    start_node(network, 0, started, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}")
    start_node(network, 1, started, "--address", address)
    here = on(network, 0)
    world = ("--world-size", str(2 * SLOTS), "--ray-address", address)
    with Served(*options, *world, before=here, beside=here) as service:
        assert answer(service, document) == expected != ""
        workers = service.json("cluster")["workers"]
        assert sorted(Counter(worker["node"] for worker in workers).values()) == [SLOTS, SLOTS]
        assert "shared_memory + gloo" in service.run("cluster").stdout
        assert service.stop() == 0

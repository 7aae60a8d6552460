"""A Ray cluster of two hosts, which are network namespaces of this machine: a node on each, its token asked for."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from bench.harness.hosts import Network
from longleaf.config import join_address
from tests.support.command_line import end
from tests.support.network.namespaces import two_hosts

RAY = str(Path(sys.executable).with_name("ray"))
SLOTS = 2
"""Default number of slots of each node."""
PORT = 6379
TOKEN = "a token of the cluster"
MOUNT = 'mount --bind "$0" "$1" && shift && exec "$@"'
COUNT = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
    time.sleep(0.2)
"""
"""Ends when a cluster has as many nodes."""
PARTS = ("ray::WorkerActor", "ray::CoordinatorActor", "coordinator")
"""Parts of the command lines of a service's processes."""


class RayNodes:
    """The nodes, by the number of their host. All see the folder `shared`; the second host sees the folder of `apart`
    in its place, like a separate disk.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.address = join_address(network.addresses[0], PORT)
        self.shared, self.apart = folder / "shared", folder / "apart"
        self._folder = folder
        self._nodes: dict[int, subprocess.Popen[str]] = {}
        for each in (self.shared, self.apart):
            each.mkdir()

    def on(self, host: int, token: str = TOKEN) -> tuple[str, ...]:
        """The prefix of a command that runs on a host. It sets no variable for the ranks' rendezvous."""
        own = [name for name in os.environ if name.startswith(("RAY_", "GLOO_", "NCCL_"))]
        unset = [word for name in own for word in ("-u", name)]  # a Ray that another test started has left them
        variables = ("env", *unset, "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={token}")
        return ("ip", "netns", "exec", self.network.namespaces[host], *variables)

    def start(self, host: int, *, slots: int = SLOTS) -> None:
        """Starts a host's node, in the place of an earlier one, and returns when it has joined."""
        is_again = host in self._nodes
        if is_again:
            end(self._nodes.pop(host))
        own = ["--node-ip-address", self.network.addresses[host], "--num-cpus", str(slots)]
        if host == 0:
            own += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
            over: tuple[str, ...] = ()
        else:
            own += ["--address", self.address]
            over = ("sh", "-c", MOUNT, str(self.apart), str(self.shared))
        command = [*self.on(host), *over, RAY, "start", *own, "--object-store-memory", "80000000", "--block"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = self._nodes[host] = subprocess.Popen(command, **pipes, start_new_session=True)
        output = ""
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if "Ray runtime started" in line:
                break
        else:
            raise AssertionError(output)
        if is_again:
            self._remove_old_nodes()

    def _remove_old_nodes(self) -> None:
        """Waits until Ray knows of every node that has ended: until then it counts their slots."""
        command = [*self.on(0), sys.executable, "-c", COUNT, self.address, str(len(self._nodes))]
        subprocess.run(command, check=True, timeout=120)

    def end(self) -> None:
        """Ends all nodes."""
        for process in self._nodes.values():
            end(process)

    def kill(self, host: int, name: str) -> psutil.Process:
        """Kills a process of a host whose name begins so."""
        found = next(one for one in self._processes(host) if _starts(one, name))
        found.send_signal(signal.SIGKILL)
        return found

    def runs(self, host: int, name: str) -> bool:
        """Whether a host has a process whose name begins so."""
        return any(_starts(one, name) for one in self._processes(host))

    def service(self) -> list[psutil.Process]:
        """The processes of services on all hosts."""
        hosts = range(len(self.network.namespaces))
        return [one for host in hosts for one in self._processes(host) if _is_part(one)]

    def cut(self) -> None:
        """Pulls the second host's cable."""
        self._cable("down")

    def mend(self) -> None:
        """Puts it in again."""
        self._cable("up")

    def _cable(self, state: str) -> None:
        command = ["ip", "-n", self.network.namespaces[1], "link", "set", self.network.interface, state]
        subprocess.run(command, check=True)

    def _processes(self, host: int) -> list[psutil.Process]:
        command = ["ip", "netns", "pids", self.network.namespaces[host]]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found = []
        for pid in map(int, result.stdout.split()):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found


@contextmanager
def ray_nodes(version: Literal[4, 6]) -> Iterator[RayNodes]:
    """A cluster whose hosts have only addresses of this IP version."""
    # a short path: the sockets of Ray lie in it, and their names have a limit
    folder = tempfile.mkdtemp(prefix="ll-", dir="/tmp")
    try:
        with two_hosts(version) as network:
            nodes = RayNodes(network, Path(folder))
            try:
                nodes.start(0)
                nodes.start(1)
                yield nodes
            finally:
                nodes.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _starts(process: psutil.Process, name: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith(name)
    return False


def _is_part(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(word.startswith(PARTS) for word in process.cmdline()[:4])
    return False

"""A Ray cluster of two nodes on this machine; one of them can be killed and restarted."""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server

import psutil

HERE = "127.0.0.1"
STARTED = "Ray runtime started"
OBJECT_STORE_BYTES = 80_000_000


class RayNodes:
    """`num_slots` on each node. Made by `ray_nodes`."""

    def __init__(self, folder: str, num_slots: int) -> None:
        with create_server((HERE, 0)) as free:
            self.address = f"{HERE}:{free.getsockname()[1]}"
        ray = str(Path(sys.executable).with_name("ray"))
        self._node = [ray, "start", f"--num-cpus={num_slots}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        self._node += ["--block", "--node-ip-address", HERE]
        port = self.address.rpartition(":")[2]
        head = ["--head", "--include-dashboard=false", f"--port={port}", f"--temp-dir={folder}"]
        self._head = _start([*self._node, *head])
        self._other = self._add()

    def _add(self) -> subprocess.Popen[str]:
        return _start([*self._node, "--address", self.address])

    def kill(self) -> None:
        """Kills the raylet of the second node: with it goes all that runs there."""
        below = psutil.Process(self._other.pid).children(recursive=True)
        for process in below:
            if process.name() == "raylet":
                process.kill()

    def come_back(self) -> None:
        """Another one takes the second node's place."""
        _end(self._other)
        self._other = self._add()

    def close(self) -> None:
        for node in (self._other, self._head):
            _end(node)


@contextmanager
def ray_nodes(num_slots: int) -> Iterator[RayNodes]:
    """Nothing of it is left after the block."""
    folder = tempfile.mkdtemp(prefix="ll-", dir="/tmp")
    try:
        nodes = RayNodes(folder, num_slots)
        try:
            yield nodes
        finally:
            nodes.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str]) -> subprocess.Popen[str]:
    """Raises RuntimeError with the command's output if the node does not start."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload]
    assert process.stdout is not None
    lines = list[str]()
    for line in process.stdout:
        lines.append(line)
        if STARTED in line:
            return process
    raise RuntimeError("".join(lines))


def _end(process: subprocess.Popen[str]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        try:
            one.send_signal(signal.SIGTERM)
        except psutil.NoSuchProcess:
            continue
    for one in psutil.wait_procs(family, timeout=5)[1]:
        one.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()

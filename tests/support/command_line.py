"""The service as an operator runs it: `longleaf serve` in a separate process, and the other commands against it."""

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.support import forked
from tests.support.forked import CLI

NAME = "acme/small 1"
"""The model name that clients see in all tests."""


class Served:
    """A running `longleaf serve`, to be entered; `output` collects its standard output. All its processes end at exit.

    `before` is a command that executes the command after it; `beside` runs client commands in the service's
    environment.
    """

    def __init__(self, *options: str, before: tuple[str, ...] = (), beside: tuple[str, ...] = ()) -> None:
        # a new session, so that every leftover process can be found
        command = [*before, *CLI, "serve", "--port", "0", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = forked.popen(command, start_new_session=True, **pipes)
        self.output = ""
        self._beside = beside

    def __enter__(self) -> Self:
        try:
            self.address = self._wait_ready()
        except BaseException:
            end(self.process)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        end(self.process)

    def _wait_ready(self) -> str:
        """The address."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith("listening on "):
                return line.removeprefix("listening on ").strip()
            if line.startswith("{"):
                return json.loads(line)["address"]
        raise AssertionError(f"exit code {self.process.wait()}: {self.output}")

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a client command against the service."""
        command = [*self._beside, *CLI, *arguments, "--server", self.address]
        return forked.run(command, input=stdin)

    def json(self, *arguments: str) -> dict:
        """The --json output of a successful command."""
        found = self.run(*arguments, "--json")
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    def rank_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.json("cluster")["workers"]]

    def processes(self) -> list[psutil.Process]:
        return [self._parent(), *self._parent().children(recursive=True)]

    def _parent(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the service with a signal and proves that nothing of it is left; returns the exit code."""
        left = Left(self.process)
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        left.audit()
        return code


class Left:
    """The processes and the Ray folder that a service has created so far and must not leave behind."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.processes: list[psutil.Process] = []
        self.folders: list[Path] = []
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            self.processes = [parent, *parent.children(recursive=True)]
        for one in self.processes:
            with suppress(psutil.Error):
                words = one.cmdline()
                self.folders += [Path(words[-1])] if "coordinator.cluster.ray_temp_dir" in words else []

    def audit(self) -> None:
        assert psutil.wait_procs(self.processes, timeout=20)[1] == []
        assert [folder for folder in self.folders if folder.exists()] == []


def end(process: subprocess.Popen) -> None:
    """Kills the leader of a session, all its processes, and their descendants."""
    family = {one for one in psutil.process_iter() if _session(one.pid) == process.pid}
    for one in list(family):
        with suppress(psutil.NoSuchProcess):
            family.update(one.children(recursive=True))
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(timeout=20)


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)


def url_of(served: Served) -> str:
    """The URL that the service prints after its address."""
    assert served.process.stdout is not None
    for line in served.process.stdout:
        if found := re.search(r"https?://\S+", line):
            return found[0].rstrip('"}')
    raise AssertionError(served.output)

"""The folder of a Ray node, with processes that stand for Ray's: the process that removes it, and the processes that
are ended."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from coordinator.cluster import ray_temp_dir
from coordinator.cluster.ray_connection import connect
from coordinator.cluster.ray_temp_dir import RayFolder
from longleaf.errors import StartError

MAKER = """
from coordinator.cluster import ray_temp_dir
ray_temp_dir.LEAVE_SECONDS = 1.0
folder = ray_temp_dir.RayFolder()
print(folder.path, flush=True)
input()
folder.close()
"""
HOLDER = "import sys; file = open(sys.argv[1], sys.argv[2]); print(flush=True); input()"
SECONDS = 20


class Scene:
    """A process that creates a folder, one that writes into it, and one that reads."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.maker = self._start(MAKER)
        assert self.maker.stdout is not None
        self.folder = Path(self.maker.stdout.readline().strip())
        (self.watcher,) = psutil.Process(self.maker.pid).children()
        self.writer = self._holder("a")
        self.reader = self._holder("r")

    def _start(self, *arguments: str) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", *arguments], **pipes)
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def _holder(self, mode: str) -> subprocess.Popen:
        """A process with an open log file."""
        holder = self._start(HOLDER, str(self.folder / "log"), mode)
        assert holder.stdout is not None
        assert holder.stdout.readline()
        return holder

    def is_ended(self) -> bool:
        """Whether the folder and its writer are gone and the reader is not."""
        assert self.writer.wait(SECONDS) == -signal.SIGKILL
        assert psutil.wait_procs([self.watcher], timeout=SECONDS)[1] == []
        deadline = time.monotonic() + SECONDS
        while self.folder.exists() and time.monotonic() < deadline:  # it is removed after its writers have ended
            time.sleep(0.01)
        return not self.folder.exists() and self.reader.poll() is None


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_leftovers_of_a_killed_owner_are_removed(stack: ExitStack) -> None:
    scene = Scene(stack)
    assert scene.folder.stat().st_mode & 0o777 == 0o700
    scene.maker.kill()
    assert scene.is_ended()


def test_closing_owner_removes_its_folder(stack: ExitStack) -> None:
    scene = Scene(stack)
    scene.maker.communicate("\n", timeout=SECONDS)
    assert (scene.maker.returncode, scene.folder.exists(), scene.watcher.is_running()) == (0, False, False)


def test_closing_owner_does_not_wait_for_a_blocked_watcher(stack: ExitStack) -> None:
    scene = Scene(stack)
    scene.watcher.suspend()
    scene.maker.communicate("\n", timeout=SECONDS)
    assert (scene.maker.returncode, scene.folder.exists(), scene.watcher.is_running()) == (0, False, False)


def test_leftovers_without_a_watcher_are_removed_by_the_next_owner(stack: ExitStack) -> None:
    left, alive = Scene(stack), Scene(stack)
    left.watcher.kill()
    left.maker.kill()
    assert left.folder.exists()
    later = RayFolder()
    assert left.is_ended()
    later.close()
    assert not later.path.exists()
    assert (alive.folder / "token").exists()
    assert [process.poll() for process in (alive.maker, alive.writer, alive.reader)] == [None] * 3


def test_folder_that_cannot_be_created_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_temp_dir, "PARENT", tmp_path / "missing")
    with pytest.raises(StartError, match="cannot create a folder for Ray: .*missing"):
        connect(None, 1)

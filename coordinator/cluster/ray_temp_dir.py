"""Folder of a Ray started by this process: its token, sockets and logs.

Nothing of that Ray outlives this process. A separate process (`python -m` this module, FOLDER) waits for the folder's
lock, which the system releases when its holder ends; then it kills the remaining Ray processes and removes the folder.
If both were killed, the next service that starts does so.
"""

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

PARENT, PREFIX = Path("/tmp"), "longleaf-ray-"
"""Parent folder with a short path: Ray puts sockets there, whose paths have a length limit."""
TOKEN_BYTES = 32
KILL_SECONDS = 1.0
LEAVE_SECONDS = 10.0
"""Seconds that the watching process may take to exit when there is nothing left to watch."""


class RayFolder:
    """A new folder that only this user can access. `token_file` contains a fresh token; `temporary` is for Ray, which
    makes it writable for all users. Raises OSError when it cannot be created."""

    def __init__(self) -> None:
        self.path, self._lock = _make()
        self.temporary = self.path / "ray"
        self.token_file = self.path / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_hex(TOKEN_BYTES))
        command = [sys.executable, "-P", "-m", __name__, str(self.path)]
        # A separate session: a signal to the service's process group must not end this process.
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._watcher = subprocess.Popen(command, **quiet, start_new_session=True)

    def close(self) -> None:
        """Removes the folder and kills the processes that still write to it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        try:
            self._watcher.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:  # it is stopped, for example by SIGSTOP
            self._watcher.kill()
            self._watcher.wait()


def _make() -> tuple[Path, int]:
    """The folder, and the open file that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # another service removed it before it was locked
                return path, lock


# --- watching process ---


def watch(folder: Path) -> None:
    """Cleans up after earlier services, then waits until the process that created `folder` ends, and cleans up after
    it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for other in PARENT.glob(f"{PREFIX}*"):
        if other != folder:
            _end_once_free(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _end_once_free(folder, fcntl.LOCK_EX)


def _end_once_free(folder: Path, how: int) -> None:
    """`how` selects whether to wait for the holder of the lock or to skip the folder."""
    with suppress(OSError):  # locked, deleted, or owned by another user
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, how)
            if os.fstat(lock).st_uid == os.geteuid() and folder.exists():
                end(folder)
        finally:
            os.close(lock)


def end(folder: Path) -> None:
    """Kills the processes of the Ray in this folder and removes the folder. Does nothing while its creator is alive."""
    while left := [one for one in psutil.process_iter() if one.pid != os.getppid() and _writes_into(folder, one)]:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=KILL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def _writes_into(folder: Path, process: psutil.Process) -> bool:
    """Whether the process has an open file in Ray's log folder, as all processes of Ray have."""
    try:
        files = [Path(file.path) for file in process.open_files() if file.mode != "r"]
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return False
    return any(file.is_relative_to(folder.resolve()) for file in files)


if __name__ == "__main__":
    watch(Path(sys.argv[1]))

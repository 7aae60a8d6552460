"""Files in /dev/shm named after their owner process, so that files of killed processes can be removed later."""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("/dev/shm")
NAME = re.compile(r"longleaf-(\d+)-(\d+)-(\d+)-\d+-[0-9a-f]+")
STATE, STARTED = 0, 19
"""Field indices in /proc/PID/stat, after the program name."""
GONE = ("Z", "X", "x")
"""States of a process that has ended."""


class ProcessIdentity(NamedTuple):
    """Identity of a process that is robust against reuse of its pid."""

    namespace: int
    """PID namespace: containers that share /dev/shm may have different ones."""
    pid: int
    started: int
    """Start time in clock ticks since boot."""

    @staticmethod
    def here() -> "ProcessIdentity":
        """Identity of this process. Raises OSError if /proc does not provide it."""
        pid = os.getpid()
        started = started_at(pid)
        if started is None:
            raise OSError("/proc has no entry for this process")
        return ProcessIdentity(os.stat("/proc/self/ns/pid").st_ino, pid, started)

    @staticmethod
    def from_file_name(name: str) -> "ProcessIdentity | None":
        """The owner of a file with this name; None if the name has another format."""
        found = NAME.fullmatch(name)
        return ProcessIdentity(*map(int, found.groups())) if found else None

    def name(self, epoch: int) -> str:
        """A new file name for this process."""
        return f"longleaf-{self.namespace}-{self.pid}-{self.started}-{epoch}-{secrets.token_hex(8)}"


def started_at(pid: int) -> int | None:
    """Start time of a process; None if it does not exist or is a zombie. Raises OSError without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[STATE].decode() in GONE else int(fields[STARTED])


def sweep(here: ProcessIdentity) -> None:
    """Removes this user's files whose owners have ended, as far as this process can determine."""
    for path in _own_files():
        maker = ProcessIdentity.from_file_name(path.name)
        if maker and maker.namespace == here.namespace and started_at(maker.pid) != maker.started:
            with suppress(OSError):  # another start may sweep concurrently
                path.unlink()


def _own_files() -> Iterator[Path]:
    for path in FOLDER.glob("longleaf-*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                yield path

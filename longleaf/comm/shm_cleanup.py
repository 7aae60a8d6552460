"""Files in /dev/shm that tell who made them, so that what a process left when it was killed is swept later."""

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
"""Places in /proc/PID/stat, after the name of the program."""
GONE = ("Z", "X", "x")
"""States of a process that has ended and holds nothing any more."""


class ProcessIdentity(NamedTuple):
    """A process, told from a later one that was given the same number."""

    namespace: int
    """In which its number counts: containers that share /dev/shm need not share their numbers."""
    pid: int
    started: int
    """When, in clock ticks since the machine's start."""

    @staticmethod
    def here() -> "ProcessIdentity":
        """The maker that is this process. Raises OSError where /proc does not tell."""
        pid = os.getpid()
        started = started_at(pid)
        if started is None:
            raise OSError("/proc does not tell of this process")
        return ProcessIdentity(os.stat("/proc/self/ns/pid").st_ino, pid, started)

    @staticmethod
    def of(name: str) -> "ProcessIdentity | None":
        """Who made a file of this name; None for a name that does not tell."""
        found = NAME.fullmatch(name)
        return ProcessIdentity(*map(int, found.groups())) if found else None

    def name(self, epoch: int) -> str:
        """A new name for a file of this process."""
        return f"longleaf-{self.namespace}-{self.pid}-{self.started}-{epoch}-{secrets.token_hex(8)}"


def started_at(pid: int) -> int | None:
    """When a process started; None when there is none, or only what is left of one. Raises OSError without /proc."""
    try:
        reported = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if reported[STATE].decode() in GONE else int(reported[STARTED])


def sweep(here: ProcessIdentity) -> None:
    """Removes this user's files whose makers are gone, as far as this process can tell."""
    for path in _own_files():
        maker = ProcessIdentity.of(path.name)
        if maker and maker.namespace == here.namespace and started_at(maker.pid) != maker.started:
            with suppress(OSError):  # another start sweeps, too
                path.unlink()


def _own_files() -> Iterator[Path]:
    for path in FOLDER.glob("longleaf-*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                yield path

"""A small disk of a test, which can become full and read-only."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.tools import lacks


class SmallDisk:
    """A file system in memory at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)


def fill(path: Path) -> None:
    """Makes a file of all the room that there is."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """A disk of `num_bytes` at `folder`, which is made. Skips the test without the right to mount."""
    folder.mkdir()
    if os.geteuid():
        lacks("mounting needs root")
    options = f"size={num_bytes},mode=700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        lacks(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

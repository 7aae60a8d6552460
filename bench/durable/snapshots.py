"""The snapshots of a data folder, read from its files, and the plain copy that they are compared with."""

import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

MANIFESTS = "*/snapshots/services/*/segments/*/*/manifest"
"""Below a data folder: a segment's manifest is written when all its pieces are there."""
LOOK_SECONDS = 0.02
SAVE_SECONDS = 600.0


class Snapshot(NamedTuple):
    """One that is complete."""

    manifest: Path
    time: float
    """When it was, in seconds since the epoch of the calendar."""

    @property
    def files(self) -> list[Path]:
        return sorted(self.manifest.parent.iterdir())

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


class SnapshotFolder:
    """Those below a data folder."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    @property
    def manifests(self) -> frozenset[Path]:
        return frozenset(self._data_dir.glob(MANIFESTS))

    def wait_new(self, before: frozenset[Path], timeout: float = SAVE_SECONDS) -> Snapshot:
        """The first that was not there before. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not (new := self.manifests - before):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no snapshot is in {self._data_dir} after {timeout:g} s")
            time.sleep(LOOK_SECONDS)
        found = min(new)
        return Snapshot(found, found.stat().st_mtime)

    def wait_gone(self, manifest: Path, timeout: float = SAVE_SECONDS) -> None:
        """Returns when a snapshot was deleted with all its files. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while manifest.parent.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{manifest.parent} is still there after {timeout:g} s")
            time.sleep(LOOK_SECONDS)


def plain_copy(files: list[Path], folder: Path) -> float:
    """Seconds of copying files into a new folder, each of them then being on the disk; the folder is removed."""
    folder.mkdir()
    began = time.perf_counter()
    for file in files:
        with file.open("rb") as source, (folder / file.name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds

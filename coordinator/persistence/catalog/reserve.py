"""Disk space of a data folder that is reserved for deletions and starts.

SQLite writes deletions to its log first, so a deletion fails on a full disk. A file occupies space while there is
enough, and is deleted when that space is needed.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from longleaf.errors import StorageUnavailable
from longleaf.formatting import human_bytes

FILE = "reserve"
"""Its file name."""
MAX_BYTES = 16 << 20
"""Size of the file: the log space for the ids of four million tokens."""
PART = 32
"""The maximum share of a small disk."""
BLOCK_BYTES = 512
"""Bytes per unit of st_blocks."""
LEAST_FREE = 4
"""Free space, as a multiple of the size, that is required for writes other than catalog and journal, and to create the
complete file."""
LEFT_PART = 8
"""On a disk with little free space, this share stays free, and the file grows by at least this share of its size."""
LOG_PART = 4
"""The part of the size that may remain in SQLite's log."""
log = logging.getLogger(__name__)


class Reserve:
    """The reserve file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._size = min(MAX_BYTES, shutil.disk_usage(folder).total // PART)

    @property
    def max_log_bytes(self) -> int:
        """Maximum size of SQLite's log: the database may have to grow by as much before a deletion completes."""
        return self._size // LOG_PART

    def make(self) -> None:
        """Reserves the space, or most of the free space if that is less. If another program fills the disk between two
        deletions, the next one still has space."""
        room, free = self._room(), self._free()
        has_enough = free >= LEAST_FREE * self._size
        size = self._size if has_enough else min(self._size, room + free - free // LEFT_PART)
        if size <= room or (room and size - room < self._size // LEFT_PART and not has_enough):
            return
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.debug("cannot reserve disk space for deletions: %s", error)
            with suppress(OSError):
                if room:
                    os.truncate(self._path, room)
                else:
                    self._path.unlink()

    @property
    def is_there(self) -> bool:
        """Whether the file occupies its full size."""
        return self._room() >= self._size

    def _room(self) -> int:
        """Bytes that the file occupies."""
        try:
            return self._path.stat().st_blocks * BLOCK_BYTES
        except OSError:
            return 0

    def release(self) -> bool:
        """Deletes the file. Returns whether that freed space."""
        try:
            self._path.unlink()
        except OSError:
            return False
        log.warning("the disk of %s is full: using the space reserved for deletions", self._path.parent)
        return True

    def prepare_start(self) -> None:
        """Deletes the file if a start would otherwise lack space."""
        if self._free() < self._size:
            self.release()

    def check_catalog(self) -> None:
        """Raises StorageUnavailable if the file was deleted and a write that adds data would use its space."""
        if not self.is_there:
            self.make()
            if not self.is_there:
                self.check()

    def check(self, num_bytes: int = 0) -> None:
        """Raises StorageUnavailable if writing `num_bytes` would leave too little space for anything but deletions."""
        free, least = self._free(), LEAST_FREE * self._size
        if free - num_bytes < least:
            needed = f", {human_bytes(num_bytes)} are needed" if num_bytes else ""
            message = f"its disk has {human_bytes(free)} free{needed}; {human_bytes(least)} are reserved for deletions"
            raise StorageUnavailable(f"{self._path.parent}: {message}; free disk space")

    def _free(self) -> int:
        with suppress(OSError):
            return shutil.disk_usage(self._path.parent).free
        return 0

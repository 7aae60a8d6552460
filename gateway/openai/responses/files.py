"""Files of stored responses, so that they survive a restart."""

import fcntl
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from longleaf.durable_files import replace_file
from longleaf.types import Message

SUFFIX = ".response"
LOCK = "lock"
log = logging.getLogger("gateway")


class TurnRecord(msgspec.Struct, frozen=True):
    """A turn of a conversation, and its response."""

    id: str
    """The id of the response."""
    owner: str
    previous: str
    """The id of the turn before; empty for the first one."""
    depth: int
    """Number of turns before."""
    messages: tuple[Message, ...]
    encoded: bytes
    """The response as JSON; empty if it was removed, and only the turn is still needed."""
    created: float
    """Seconds since 1970."""
    expires: float


class ResponseFiles:
    """A folder with one file for each turn. A thread writes the latest state of each, so changes never wait for the
    disk, and a turn that changes faster than the disk is written once. Errors of the disk are logged."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder, and locks it. Raises OSError; BlockingIOError if another gateway uses it."""
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the data folder, if the service did not make it
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lock_file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_file)
            raise
        self._folder = folder
        self._pending = dict[str, TurnRecord | None]()
        """By id, the next state to write; None: no file."""
        self._lock = threading.Lock()
        self._is_writing = False
        self._executor = ThreadPoolExecutor(1, "responses")

    def load(self) -> list[TurnRecord]:
        """The records in all files, the earlier turns of each conversation first. Deletes files that cannot be read."""
        records = list[TurnRecord]()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                record = msgspec.msgpack.decode(path.read_bytes(), type=TurnRecord)
                if path != self._path(record.id):
                    raise ValueError("the file has the name of another response")
                records.append(record)
            except (OSError, ValueError) as error:
                log.warning("a stored response cannot be read: %s", error)
                self.delete(path.name.removesuffix(SUFFIX))
        return sorted(records, key=lambda record: (record.depth, record.created))

    def save(self, record: TurnRecord) -> None:
        """Replaces the file of a turn, soon."""
        self._write(record.id, record)

    def delete(self, record_id: str) -> None:
        """Deletes the file of a turn, soon."""
        self._write(record_id, None)

    def close(self) -> None:
        """Waits until all changes are written, and releases the folder."""
        self._executor.shutdown()
        os.close(self._lock_file)

    def _write(self, record_id: str, record: TurnRecord | None) -> None:
        with self._lock:
            self._pending.pop(record_id, None)  # the order of the files is that of their last changes
            self._pending[record_id] = record
            is_writing, self._is_writing = self._is_writing, True
        if not is_writing:
            self._executor.submit(self._write_pending)

    def _write_pending(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._is_writing = False
                    return
                record_id = next(iter(self._pending))
                record = self._pending.pop(record_id)
            try:
                if record is None:
                    self._path(record_id).unlink(missing_ok=True)
                else:
                    replace_file(self._path(record_id), msgspec.msgpack.encode(record))
            except OSError as error:
                log.warning("a stored response cannot be written: %s", error.strerror)

    def _path(self, record_id: str) -> Path:
        return self._folder / f"{record_id}{SUFFIX}"

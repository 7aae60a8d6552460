"""The journal of resumable generations: their requests and their events."""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from blake3 import blake3

from coordinator.engine_messages import Admitted, Ended, Event, Tokens
from coordinator.persistence.journal.entries import Entry, GenerationEntry, JournalEvent, encode_entry, read_entries
from longleaf.errors import StorageUnavailable

SUFFIX = ".journal"


class JournaledGeneration(NamedTuple):
    """A resumable generation and its recorded events, in order."""

    entry: GenerationEntry
    events: list[JournalEvent]


class Journal:
    """One append-only file per resumable generation, readable only by its owner.

    Entries are written immediately but not synced to the disk. They survive the death of any process, but a crash of
    the machine may truncate a journal. `checkpoint` identifies the model.
    """

    def __init__(self, folder: Path, checkpoint: str = "") -> None:
        """Create the folder if it does not exist. Raises StorageUnavailable."""
        self._folder = folder
        self._checkpoint = checkpoint
        self._contexts: dict[str, str | None] = {}
        """The context of each generation, by request id."""
        with _storing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def begin(self, entry: GenerationEntry) -> "JournalWriter":
        """Start the record of a new generation, which replaces an earlier one of the same id. Raises
        StorageUnavailable.
        """
        self.remove(entry.request_id)
        record = JournalWriter(self._path(entry.request_id), os.O_CREAT | os.O_EXCL)
        self._contexts[entry.request_id] = entry.request.context
        try:
            record.write(msgspec.structs.replace(entry, checkpoint=self._checkpoint))
        except StorageUnavailable:
            record.close()
            raise
        return record

    def reopen(self, request_id: str) -> "JournalWriter":
        """Open the record of an existing generation. Raises StorageUnavailable."""
        return JournalWriter(self._path(request_id))

    def load(self) -> Iterator[JournaledGeneration]:
        """Yield the generations of earlier service runs.

        A file is truncated before its first torn or damaged entry. A file without a usable entry, or of another
        checkpoint, is removed. Raises StorageUnavailable.
        """
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with _storing(path):
                if (retained := self._read(path)) is None:
                    path.unlink()
                    continue
            self._contexts[retained.entry.request_id] = retained.entry.request.context
            yield retained

    def _read(self, path: Path) -> JournaledGeneration | None:
        size, end, entries = path.stat().st_size, 0, list[Entry]()
        with path.open("rb") as file:
            for entry, end in read_entries(file, size):  # noqa: B007
                entries.append(entry)
        if not entries or not isinstance(resident := entries[0], GenerationEntry):
            return None
        if resident.checkpoint != self._checkpoint or path != self._path(resident.request_id):
            return None
        if end < size:
            os.truncate(path, end)
        return JournaledGeneration(resident, [entry for entry in entries if not isinstance(entry, GenerationEntry)])

    def remove(self, request_id: str) -> None:
        """Remove the record of a generation, which may continue unrecorded. Idempotent. Raises StorageUnavailable."""
        path = self._path(request_id)
        with _storing(path), suppress(FileNotFoundError):
            path.unlink()
        self._contexts.pop(request_id, None)

    def remove_of_context(self, context: str) -> None:
        """Remove the records of all generations on a context. Raises StorageUnavailable."""
        for request_id in [request_id for request_id, requested in self._contexts.items() if requested == context]:
            self.remove(request_id)

    def _path(self, request_id: str) -> Path:
        return self._folder / f"{blake3(request_id.encode()).hexdigest()}{SUFFIX}"


class JournalWriter:
    """Appends entries to one file. After the removal of the file, writes have no effect."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        """Raises StorageUnavailable."""
        self._path = path
        with _storing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o600)

    def append(self, event: Event) -> None:
        """Record an event, unless it is transient. If it raises StorageUnavailable, the event must not be published.
        The attention of tokens is not recorded, because it may be much larger than the tokens.
        """
        if isinstance(event, Tokens) and event.attention:
            event = msgspec.structs.replace(event, attention=())
        if isinstance(event, Tokens | Admitted | Ended):
            self.write(event)

    def write(self, entry: Entry) -> None:
        """Raises StorageUnavailable, possibly after a part of the entry was written."""
        content = encode_entry(entry)
        try:
            while (num_written := os.write(self._descriptor, content)) < len(content):
                content = content[num_written:]  # the disk may be nearly full: the next write raises
        except OSError as error:
            raise _refused(self._path, error) from error

    def close(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _storing(path: Path) -> Generator[None, None, None]:
    """Convert OSError into StorageUnavailable."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> StorageUnavailable:
    return StorageUnavailable(f"{path}: {error.strerror or error}")

"""Protocols of the catalog, each small enough to be faked.

All of them are implemented by coordinator.persistence.catalog.catalog and faked by
tests.support.fakes.catalog. Operations are atomic and run in the order of the calls, even if the caller is
cancelled. Every method except `load` and `close` raises StorageUnavailable when the database cannot be written or read
now, and a retry may succeed; DataLoss when the database is damaged; Unavailable when the service is stopping.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

from coordinator.persistence.catalog.records import (
    CatalogContents,
    Change,
    CommitResult,
    OutboxEntry,
    UploadKey,
    UploadRecord,
)

NO_STARTS = array("Q")


class ContextCatalog(Protocol):
    """Stores contexts."""

    async def load(self) -> CatalogContents:
        """Reads all records. Raises CatalogError with a remedy when they cannot be read."""
        ...

    async def commit(self, change: Change) -> CommitResult:
        """Stores a change: once this returns, it survives a crash, and deleted token ids are erased from the disk. If
        they cannot be erased, because another process reads the file or the disk is full, that is logged and the
        next commit retries."""
        ...

    async def note_epoch(self, epoch: int) -> None:
        """Stores the number of an epoch, unless a greater one is stored."""
        ...

    async def close(self) -> None:
        """Finishes queued operations and closes the database. Idempotent."""
        ...


class UploadCatalog(Protocol):
    """Stores unfinished uploads."""

    async def append_upload(
        self, record: UploadRecord, start: int, new_ids: "array[int]", new_starts: "array[int]" = NO_STARTS
    ) -> None:
        """Inserts or replaces a record, and appends token ids to the first `start`, with their offsets in the text (of
        each STRIDE-th token, or none). Raises NotFound when the upload was dropped, and DataLoss when it has another
        number of ids, as after a failed call; then nothing changes."""
        ...

    async def upload_ids(self, key: UploadKey) -> "array[int]":
        """The ids of an upload; empty if it does not exist. Raises DataLoss when they are damaged."""
        ...

    async def upload_starts(self, key: UploadKey) -> "array[int]":
        """Offsets of its tokens in its text, as far as they were stored. Raises DataLoss when they are damaged."""
        ...

    async def drop_upload(self, key: UploadKey) -> None:
        """Deletes record and ids, if they exist."""
        ...


class Outbox(Protocol):
    """The outbox: keeps objects until they are written to storage. One task at a time may send them. Of several entries
    with one name only the last counts; it is returned after the earlier ones are completed."""

    async def outgoing(self, limit: int, *, only_deletions: bool = False) -> list[tuple[int, OutboxEntry]]:
        """The oldest entries with their keys, at most `limit`; damaged ones are skipped."""
        ...

    async def done(self, keys: Sequence[int]) -> None:
        """Deletes entries that are on storage."""
        ...

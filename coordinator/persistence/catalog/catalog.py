"""The catalog: a database with its own thread, which executes one operation at a time."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from coordinator.persistence.catalog import writer
from coordinator.persistence.catalog.database import BUSY_SECONDS, Database
from coordinator.persistence.catalog.reader import load, load_names
from coordinator.persistence.catalog.records import (
    CatalogContents,
    Change,
    CommitResult,
    OutboxEntry,
    UploadKey,
    UploadRecord,
)
from coordinator.persistence.catalog.reserve import Reserve
from coordinator.persistence.catalog.sqlite_errors import is_full, startup_error
from longleaf.errors import StorageUnavailable, Unavailable

DATABASE = "catalog.db"
"""File name of the database in its folder."""
NO_STARTS = array("Q")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Catalog:
    """Stores contexts, unfinished uploads, and the outbox: objects that are not on storage yet. One task at a time may
    send those. Of several entries with one name only the last counts; it is returned after the earlier ones are
    completed. The caller of `open` must hold the lock of the folder.

    Operations are atomic and run in the order of the calls, even if the caller is cancelled. Every method except `load`
    and `close` raises StorageUnavailable when the database cannot be written or read now, and a retry may succeed;
    DataLoss when the database is damaged; Unavailable when the service is stopping."""

    def __init__(self, database: Database, thread: ThreadPoolExecutor, reserve: Reserve | None = None) -> None:
        """`reserve` is disk space for deletions. Only `thread` uses `database` and `reserve`."""
        self._database = database
        self._thread = thread
        self._reserve = reserve
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, path: Path, busy_seconds: float = BUSY_SECONDS, reserve: Reserve | None = None) -> "Catalog":
        """Opens the database at `path`, and creates it if missing. Raises CatalogError with a remedy."""
        database = Database(path, busy_seconds, max_log_bytes=None if reserve is None else reserve.max_log_bytes)
        thread = ThreadPoolExecutor(1, thread_name_prefix="catalog")
        catalog = cls(database, thread, reserve)
        try:
            await catalog._call(database.open)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return catalog

    async def load(self) -> CatalogContents:
        """Reads all records. Raises CatalogError with a remedy when they cannot be read."""
        return await self._call(self._load)

    def _load(self) -> CatalogContents:
        with self._database.transaction(startup_error) as connection:
            return load(self._database.path, connection)

    async def commit(self, change: Change) -> CommitResult:
        """Stores a change: once this returns, it survives a crash, and deleted token ids are erased from the disk. If
        they cannot be erased, because another process reads the file or the disk is full, that is logged and the
        next commit retries."""
        return await self._call(self._commit, change)

    def _commit(self, change: Change) -> CommitResult:
        write = self._write_at_any_rate if change.only_drops else self._write_if_room
        try:
            committed = write(writer.write_change, change)
            is_deletion = any(each.content is None for each in change.outgoing)
            if committed.segments or change.dropped_contexts or change.dropped_uploads or is_deletion:
                self._database.mark_deleted()
            self._database.truncate_wal(self._release_room)
            return committed
        finally:
            self._reserve_room()

    def _reserve_room(self) -> None:
        if self._reserve is not None:
            self._reserve.make()

    def _release_room(self) -> bool:
        """Releases the reserve; returns whether that freed space."""
        return self._reserve is not None and self._reserve.release()

    async def note_epoch(self, epoch: int) -> None:
        """Stores the number of an epoch, unless a greater one is stored."""
        await self._call(self._write_and_reserve, writer.write_epoch, epoch)  # the start may have used the reserve

    async def append_upload(
        self, record: UploadRecord, start: int, new_ids: "array[int]", new_starts: "array[int]" = NO_STARTS
    ) -> None:
        """Inserts or replaces a record, and appends token ids to the first `start`, with their offsets in the text (of
        each STRIDE-th token, or none). Raises NotFound when the upload was dropped, and DataLoss when it has another
        number of ids, as after a failed call; then nothing changes."""
        await self._call(self._write_if_room, writer.append_upload, record, start, new_ids, new_starts)

    async def upload_ids(self, key: UploadKey) -> "array[int]":
        """The ids of an upload; empty if it does not exist. Raises DataLoss when they are damaged."""
        return await self._call(self._write, writer.read_upload, key)

    async def upload_starts(self, key: UploadKey) -> "array[int]":
        """Offsets of its tokens in its text, as far as they were stored. Raises DataLoss when they are damaged."""
        return await self._call(self._write, writer.read_upload_starts, key)

    async def drop_upload(self, key: UploadKey) -> None:
        """Deletes record and ids, if they exist."""
        await self.commit(Change(dropped_uploads=(key,)))

    async def outgoing(self, limit: int, *, only_deletions: bool = False) -> list[tuple[int, OutboxEntry]]:
        """The oldest entries with their keys, at most `limit`; damaged ones are skipped."""
        return await self._call(self._write, writer.read_outgoing, limit, only_deletions)

    async def done(self, keys: Sequence[int]) -> None:
        """Deletes entries that are on storage."""
        await self._call(self._write_and_reserve, writer.drop_outgoing, keys)

    async def close(self) -> None:
        """Finishes queued operations and closes the database. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.wrap_future(self._submit(self._database.close))
            self._thread.shutdown(wait=False)  # queued operations are finished
        await asyncio.shield(self._closing)

    def _write(
        self,
        function: Callable[Concatenate[Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Runs the operation in a transaction."""
        with self._database.transaction() as connection:
            return function(connection, *args, **kwargs)

    def _write_if_room(
        self,
        function: Callable[Concatenate[Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Like `_write`, but raises an error if the reserve for deletions was released."""
        if self._reserve is not None:
            self._reserve.check_catalog()
        return self._write(function, *args, **kwargs)

    def _write_at_any_rate(
        self,
        function: Callable[Concatenate[Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Like `_write`, but also succeeds on a full disk if there is a reserve."""
        try:
            return self._write(function, *args, **kwargs)
        except StorageUnavailable as error:
            if not is_full(error) or not self._release_room():
                raise
        return self._write(function, *args, **kwargs)

    def _write_and_reserve(
        self,
        function: Callable[Concatenate[Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Like `_write_at_any_rate`, but then restores the reserve from the free space, for the next deletion."""
        try:
            return self._write_at_any_rate(function, *args, **kwargs)
        finally:
            self._reserve_room()

    async def _call(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Runs the operation in the thread, after all earlier ones, even if this call is cancelled."""
        called = self._submit(partial(function, *args, **kwargs))
        return await asyncio.shield(asyncio.wrap_future(called))

    def _submit(self, function: Callable[[], Result]) -> "Future[Result]":
        if self._closing is not None:
            raise Unavailable("the service is stopping")
        return self._thread.submit(function)


def read_only_catalog(folder: Path) -> CatalogContents:
    """Reads the contents of another folder, whose service may be running. Takes no lock and changes nothing. Raises
    CatalogError."""
    return _read_only(folder / DATABASE, partial(load, folder / DATABASE))


def read_only_names(folder: Path) -> tuple[str, ...]:
    """Reads the ids of the contexts of another folder, as `read_only_catalog`. Raises CatalogError."""
    return _read_only(folder / DATABASE, load_names)


def _read_only(path: Path, read: Callable[[Connection], Result]) -> Result:
    database = Database(path, is_read_only=True)
    database.open()
    try:
        with database.transaction(startup_error) as connection:
            return read(connection)
    finally:
        database.close()

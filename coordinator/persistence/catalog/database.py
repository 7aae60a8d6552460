"""The database file: its single connection, for one thread, and the checks at the start."""

import logging
import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.pool import NullPool

from coordinator.persistence.catalog.schema import check_revision, upgrade
from coordinator.persistence.catalog.sqlite_errors import (
    KEEPS_CONNECTION,
    Errors,
    Turn,
    code_of,
    damaged,
    runtime_error,
    startup_error,
    translated_errors,
)
from coordinator.persistence.catalog.tables import PAGE_BYTES
from longleaf.durable_files import rename_file
from longleaf.errors import CatalogError
from longleaf.formatting import human_bytes

log = logging.getLogger(__name__)

BUSY_SECONDS = 5.0
"""The time in seconds that a commit waits for another process, such as a shell, to release the file."""
PRAGMAS = (
    f"page_size={PAGE_BYTES}",  # for new files
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "secure_delete=ON",  # deleted content is overwritten
    "temp_store=MEMORY",  # and is never written to temporary files
)


class Database:
    """The catalog file at `path`, which `open` creates with mode 0600 if it is missing. Must be used by one thread
    only.
    """

    def __init__(
        self,
        path: Path,
        busy_seconds: float = BUSY_SECONDS,
        *,
        is_read_only: bool = False,
        max_log_bytes: int | None = None,
    ) -> None:
        """The WAL is checkpointed when it reaches `max_log_bytes`, by default at SQLite's own limit."""
        self.path = path
        self._max_log_bytes = max_log_bytes
        self._busy_seconds = busy_seconds
        self._is_read_only = is_read_only
        self._connection: Connection | None = None
        self._raw: sqlite3.Connection | None = None
        self._identity = (0, 0)
        """Device and inode of the open file."""
        self._has_remains = False
        """Whether the WAL may still contain deleted content."""

    def open(self) -> None:
        """Check the file and migrate its schema to the current version, which a read-only file must already have.
        Raises CatalogError.
        """
        with translated_errors(self.path, startup_error):
            if not self.path.exists() and not self._is_read_only:
                self._make()
            size = self.path.stat().st_size
        if size < PAGE_BYTES:
            raise damaged(self.path, f"it is truncated to {human_bytes(size)}")
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        """Create the file under another name and rename it when it is complete, so that an empty file is a truncated
        one.
        """
        if _has_log(self.path):
            reason = f"{self.path} is missing, but {self.path}-wal exists with its latest changes"
            raise CatalogError(
                f"{reason}: restore the missing file, or move the other one away to start with an empty catalog"
            )
        new = self.path.with_suffix(".new")
        for ending in ("", "-wal", "-shm"):
            Path(f"{new}{ending}").unlink(missing_ok=True)
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # SQLite creates its other files with the mode of this one
        finally:
            os.close(descriptor)
        database = Database(new, self._busy_seconds)
        try:
            with database.transaction(startup_error) as connection:
                upgrade(self.path, connection)
        finally:
            database.close()
        rename_file(new, self.path)

    def _check(self) -> None:
        with self.transaction(startup_error) as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise damaged(self.path, f"it is damaged ({found})")
            if self._is_read_only:
                check_revision(self.path, connection)
            else:
                upgrade(self.path, connection)
        if not self._is_read_only:
            self.mark_deleted()  # of a service that ended before its cleanup, and of tables dropped by migrations
            self.truncate_wal()

    @contextmanager
    def transaction(self, turn: Turn = runtime_error) -> Generator[Connection, None, None]:
        """Commit all operations within, or none. Raises errors converted by `turn`; later transactions may succeed."""
        try:
            connection = self._connected()
            with connection.begin():
                yield connection
        except Errors as error:
            self._recover(error)
            raise turn(self.path, error) from error

    def _recover(self, error: Exception) -> None:
        """Roll back, and reopen the connection unless the error allows its further use."""
        raw = self._raw
        try:
            if raw is not None and raw.in_transaction:  # for example after a failed commit
                raw.rollback()
        except sqlite3.Error:
            self.close()
        if code_of(error) not in KEEPS_CONNECTION:
            self.close()

    def _connected(self) -> Connection:
        """Return the connection to the file at `path`. SQLite would continue to write to a file that was moved or
        deleted, where no later start would find the data.
        """
        if self._connection is not None and not self._is_there():
            self.close()
        return self._connection or self._connect()

    def _is_there(self) -> bool:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _connect(self) -> Connection:
        engine = create_engine("sqlite://", creator=self._open_file, poolclass=NullPool, hide_parameters=True)
        begin = "BEGIN" if self._is_read_only else "BEGIN IMMEDIATE"

        @event.listens_for(engine, "begin")
        def _(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
            connection.exec_driver_sql(begin)

        connection = engine.connect()
        found = self.path.stat()
        self._connection, self._identity = connection, (found.st_dev, found.st_ino)
        return connection

    def _open_file(self) -> sqlite3.Connection:
        if not self._is_read_only:
            self._raw = self._open_as("mode=rw")
            return self._raw
        try:
            self._raw = self._open_as("mode=ro")
        except sqlite3.OperationalError:
            # SQLite creates a WAL next to a file without one, which fails in a read-only folder
            if _has_log(self.path):
                raise
            self._raw = self._open_as("immutable=1")
        return self._raw

    def _open_as(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?{mode}"
        raw = sqlite3.connect(uri, uri=True, timeout=self._busy_seconds, isolation_level=None)
        try:
            raw.text_factory = _text
            if self._is_read_only:
                raw.execute("PRAGMA schema_version")
            else:
                for pragma in PRAGMAS:
                    raw.execute(f"PRAGMA {pragma}")
                if self._max_log_bytes is not None:
                    raw.execute(f"PRAGMA wal_autocheckpoint={max(1, self._max_log_bytes // PAGE_BYTES)}")
        except BaseException:
            raw.close()
            raise
        return raw

    def mark_deleted(self) -> None:
        """Note that content was deleted that must not remain on the disk."""
        self._has_remains = True

    def truncate_wal(self, release_room: Callable[[], bool] = lambda: False) -> None:
        """Truncate the WAL if it may contain deleted content. On a full disk, retry once if `release_room` returns
        True. After a failure (another process reads, the disk is full) the next call retries.
        """
        if not self._has_remains or self._raw is None:
            return
        try:
            is_busy, *_ = self._raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._has_remains, reason = bool(is_busy), "another process is reading it"
        except sqlite3.Error as error:
            if code_of(error) == sqlite3.SQLITE_FULL and release_room():
                self.truncate_wal()
                return
            reason = str(error)
        if self._has_remains:
            log.warning("%s-wal contains deleted data until the next commit: %s", self.path, reason)

    def close(self) -> None:
        """Close the file. The next transaction opens it again."""
        connection, self._connection, raw, self._raw = self._connection, None, self._raw, None
        if connection is not None:
            with suppress(*Errors):
                connection.invalidate()
        if raw is not None:
            with suppress(sqlite3.Error):
                raw.close()


def _has_log(path: Path) -> bool:
    """Return whether there are commits that are not in the database file yet."""
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0


def _text(content: bytes) -> str:
    """Decode leniently: damaged text is detected by its checksum."""
    return content.decode(errors="replace")

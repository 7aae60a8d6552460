"""Conversion of SQLite and disk errors to errors that name a remedy."""

import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from longleaf.errors import CatalogError, DataLoss, LongleafError, StorageUnavailable

RETRY_SECONDS = 1.0
REMEDY = (
    "restore its folder from a backup, rebuild it from storage (longleaf contexts rebuild), or move the folder away to "
    "start with an empty catalog"
)


class CatalogDamaged(CatalogError):
    """The file exists, but is not a usable catalog."""


class SqliteErrorInfo(NamedTuple):
    """The meaning of an SQLite error."""

    reason: str
    remedy: str
    is_damage: bool = False
    retry_seconds: float | None = None


DAMAGED = SqliteErrorInfo("it is damaged", REMEDY, is_damage=True)
LOCKED = SqliteErrorInfo("another process has locked it", "stop the other process", retry_seconds=RETRY_SECONDS)
PERMISSION = "give this user permission to read and write the file and its folder"
FAULTS = {
    sqlite3.SQLITE_FULL: SqliteErrorInfo("the disk is full", "free disk space"),
    sqlite3.SQLITE_READONLY: SqliteErrorInfo("it is read-only or was moved", f"restore it, and {PERMISSION}"),
    sqlite3.SQLITE_IOERR: SqliteErrorInfo(
        "its disk failed, or a quota is exceeded", "check the disk, the quota and the kernel log"
    ),
    sqlite3.SQLITE_BUSY: LOCKED,
    sqlite3.SQLITE_LOCKED: LOCKED,
    sqlite3.SQLITE_PROTOCOL: LOCKED,
    sqlite3.SQLITE_CANTOPEN: SqliteErrorInfo("it cannot be opened", f"restore it, and {PERMISSION}"),
    sqlite3.SQLITE_PERM: SqliteErrorInfo("access is denied", PERMISSION),
    sqlite3.SQLITE_NOMEM: SqliteErrorInfo("there is too little memory", "give the service more memory"),
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_NOTADB: DAMAGED,
    sqlite3.SQLITE_CONSTRAINT: SqliteErrorInfo("its contents are inconsistent", REMEDY, is_damage=True),
}
"""The meaning of each primary error code."""
KEEPS_CONNECTION = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CONSTRAINT}
"""Errors that keep the connection. After other errors it is reopened, because its view of the file may be wrong."""

Errors = (SQLAlchemyError, sqlite3.Error, OSError)
Turn = Callable[[Path, Exception], LongleafError]


def code_of(error: Exception) -> int:
    """Return the primary code; SQLITE_ERROR if the error has none."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def classify(error: Exception) -> SqliteErrorInfo:
    """Return the meaning of an error, with the message of SQLite or of the system."""
    cause = getattr(error, "orig", None) or error
    known = FAULTS.get(code_of(error), SqliteErrorInfo("it cannot be used", "check the disk and the folder"))
    return known._replace(reason=f"{known.reason} ({cause})")


def is_full(error: Exception) -> bool:
    """Return whether an error of this module was caused by a full disk."""
    cause = error.__cause__
    return isinstance(cause, Exception) and code_of(cause) == sqlite3.SQLITE_FULL


def runtime_error(path: Path, error: Exception) -> LongleafError:
    """Return DataLoss if the file is damaged, otherwise StorageUnavailable."""
    fault = classify(error)
    if fault.is_damage:
        return DataLoss(f"catalog {path}", f"{fault.reason}; {fault.remedy}")
    return StorageUnavailable(f"catalog {path}: {fault.reason}; {fault.remedy}", fault.retry_seconds)


def startup_error(path: Path, error: Exception) -> LongleafError:
    """Return CatalogDamaged if the file is damaged, otherwise CatalogError."""
    fault = classify(error)
    kind = CatalogDamaged if fault.is_damage else CatalogError
    return kind(f"catalog {path}: {fault.reason}; {fault.remedy}")


def damaged(path: Path, reason: str) -> CatalogDamaged:
    """Return the error for damage that SQLite does not detect."""
    return CatalogDamaged(f"catalog {path}: {reason}; {REMEDY}")


@contextmanager
def translated_errors(path: Path, turn: Turn) -> Generator[None, None, None]:
    """Convert errors of SQLite and of the system with `turn`."""
    try:
        yield
    except Errors as error:
        raise turn(path, error) from error

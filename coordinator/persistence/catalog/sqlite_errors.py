"""What SQLite and the disk can say no with, as errors that tell what to do."""

import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from longleaf.errors import CatalogError, DataLoss, LongleafError, StorageUnavailable

RETRY_SECONDS = 1.0
REMEDY = (
    "restore its folder from a copy, make it anew of what lies on storage (longleaf contexts rebuild), or move the "
    "folder away to begin anew"
)


class CatalogDamaged(CatalogError):
    """The file is there, and is no catalog that could be used."""


class SqliteErrorInfo(NamedTuple):
    """What an error of SQLite means."""

    reason: str
    remedy: str
    is_damage: bool = False
    retry_seconds: float | None = None


DAMAGED = SqliteErrorInfo("it is damaged", REMEDY, is_damage=True)
LOCKED = SqliteErrorInfo("another process holds it locked", "end what else has it open", retry_seconds=RETRY_SECONDS)
PERMISSION = "give this user the permission to read and write file and folder"
FAULTS = {
    sqlite3.SQLITE_FULL: SqliteErrorInfo("the disk is full", "make room there"),
    sqlite3.SQLITE_READONLY: SqliteErrorInfo("it is read-only, or was moved", f"put it back, and {PERMISSION}"),
    sqlite3.SQLITE_IOERR: SqliteErrorInfo(
        "its disk fails, or a quota is met", "look at disk, quota and the log of the kernel"
    ),
    sqlite3.SQLITE_BUSY: LOCKED,
    sqlite3.SQLITE_LOCKED: LOCKED,
    sqlite3.SQLITE_PROTOCOL: LOCKED,
    sqlite3.SQLITE_CANTOPEN: SqliteErrorInfo("it cannot be opened", f"put it back, and {PERMISSION}"),
    sqlite3.SQLITE_PERM: SqliteErrorInfo("it may not be opened", PERMISSION),
    sqlite3.SQLITE_NOMEM: SqliteErrorInfo("there is too little memory", "give the service more"),
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_NOTADB: DAMAGED,
    sqlite3.SQLITE_CONSTRAINT: SqliteErrorInfo("it does not hold what this builds upon", REMEDY, is_damage=True),
}
"""By the primary code."""
KEEPS_CONNECTION = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CONSTRAINT}
"""After any other one a new connection is made: what the old one believes of the file may be wrong."""

Errors = (SQLAlchemyError, sqlite3.Error, OSError)
Turn = Callable[[Path, Exception], LongleafError]


def code_of(error: Exception) -> int:
    """The primary code; that of an error in general where there is none."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def fault_of(error: Exception) -> SqliteErrorInfo:
    """What an error means, with the words of SQLite or of the system."""
    cause = getattr(error, "orig", None) or error
    known = FAULTS.get(code_of(error), SqliteErrorInfo("it cannot be used", "look at the disk and at the folder"))
    return known._replace(reason=f"{known.reason} ({cause})")


def is_full(error: Exception) -> bool:
    """Whether an error of this module comes from a full disk."""
    cause = error.__cause__
    return isinstance(cause, Exception) and code_of(cause) == sqlite3.SQLITE_FULL


def while_running(path: Path, error: Exception) -> LongleafError:
    """DataLoss where the file is damaged, otherwise StorageUnavailable."""
    fault = fault_of(error)
    if fault.is_damage:
        return DataLoss(f"catalog {path}", f"{fault.reason}; {fault.remedy}")
    return StorageUnavailable(f"catalog {path}: {fault.reason}; {fault.remedy}", fault.retry_seconds)


def at_start(path: Path, error: Exception) -> LongleafError:
    """CatalogError; CatalogDamaged where the file is damaged."""
    fault = fault_of(error)
    kind = CatalogDamaged if fault.is_damage else CatalogError
    return kind(f"catalog {path}: {fault.reason}; {fault.remedy}")


def damaged(path: Path, reason: str) -> CatalogDamaged:
    """What is said of a file with which something is wrong that SQLite does not see."""
    return CatalogDamaged(f"catalog {path}: {reason}; {REMEDY}")


@contextmanager
def turned(path: Path, turn: Turn) -> Generator[None, None, None]:
    """Raises what `turn` makes of each error of SQLite and of the system."""
    try:
        yield
    except Errors as error:
        raise turn(path, error) from error

"""The file of a catalog: opened, brought to the present tables, and what can go wrong with it in words."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from longleaf.errors import CatalogError, StorageUnavailable
from longleaf.units import human_seconds

FILE_MODE = 0o600
BUSY_SECONDS = 5.0
"""How long a write waits for whoever else has the file open."""
PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")
"""What is deleted must be gone, and what is committed must be there after the power fails."""
REMEDY = (
    "restore it from a copy, or move it away: `longleaf contexts rebuild --from URL` makes a new one of what lies on "
    "storage, else contexts must be ingested again"
)
DAMAGES = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
MIGRATIONS = Path(__file__).parent / "migrations"


def open_database(path: Path) -> Connection:
    """The only connection to a catalog's file, which is made if it is missing. Any thread may use it, one at a time.
    Raises CatalogError."""
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS, "isolation_level": None},
    )
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE_MODE))  # SQLite gives the files beside it the same mode
        connection = engine.connect()
        _check(connection)
        _upgrade(connection, path)
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        engine.dispose()
        raise CatalogError(f"{path} {_told(error)}") from error
    except CatalogError:
        engine.dispose()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, _: object) -> None:
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _check(connection: Connection) -> None:
    """Raises sqlite3.DatabaseError for a file that is not whole."""
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    connection.rollback()
    if found != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {found}")


def _upgrade(connection: Connection, path: Path) -> None:
    """Brings the tables to those of this version. Raises CatalogError for such of a later one."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    heads = MigrationContext.configure(connection).get_current_heads()
    connection.rollback()
    if not set(heads) <= known:
        raise CatalogError(f"{path} was written by a later version of longleaf (tables {', '.join(heads)}): use that")
    if heads != tuple(scripts.get_heads()):
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()


def erase_log(connection: Connection) -> None:
    """Has nothing lie in the log of writes, outside of any transaction: what was deleted would still be there."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextmanager
def writing(connection: Connection, path: Path) -> Generator[None, None, None]:
    """A transaction. Raises StorageUnavailable when it cannot be kept; then nothing of it is."""
    try:
        with connection.begin():
            yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        with suppress(SQLAlchemyError, sqlite3.Error):
            connection.rollback()
        raise StorageUnavailable(f"{path} {_told(error)}") from error


def _told(error: Exception) -> str:
    """What is wrong with a catalog's file, and what to do."""
    found = getattr(error, "orig", None) or error
    name = getattr(found, "sqlite_errorname", "") or ""
    if (
        any(name.startswith(damage) for damage in DAMAGES)
        or "malformed" in str(found)
        or "not a database" in str(found)
    ):
        return f"is damaged ({found}): {REMEDY}"
    match name.removeprefix("SQLITE_").partition("_")[0]:
        case "FULL":
            return "cannot be written: the disk is full; free some space there"
        case "READONLY":
            return "cannot be written: it is read-only; let the user of this service write there"
        case "BUSY" | "LOCKED":
            return f"is locked by another program for more than {human_seconds(BUSY_SECONDS)}; end that"
        case "CANTOPEN" | "PERM" | "AUTH":
            return f"cannot be opened ({found}); let the user of this service read and write there"
        case "IOERR":
            return f"cannot be read or written ({name}: {found}); look after the disk, or its space"
        case _:
            return f"cannot be used ({name or type(found).__name__}: {found})"

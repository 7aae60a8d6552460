"""The schema of a database, and the migrations that bring it up to date."""

import secrets
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from coordinator.persistence.catalog import row_codec, tables
from longleaf.errors import CatalogError

MIGRATIONS = "coordinator.persistence.catalog:migrations"


def revision_of(connection: Connection) -> str | None:
    """The revision that Alembic recorded; None in a new database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(path: Path, connection: Connection) -> None:
    """Runs the pending migrations in the transaction of the connection. Raises CatalogError for the schema of a later
    version."""
    revision = revision_of(connection)
    if revision == tables.HEAD:
        return
    from alembic import command  # imported here because the import takes half a second
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", MIGRATIONS)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise CatalogError(
            f"catalog {path}: written by a later version of longleaf (schema {revision}; supported: {tables.HEAD}); "
            "use that version, or move the folder away to start with an empty catalog"
        )
    command.upgrade(config, tables.HEAD)
    if revision is None:
        row = {"id": 0, "service_id": secrets.token_hex(16), "next_segment": 0, "next_outgoing": 0, "epoch": 0}
        connection.execute(tables.service.insert(), row_codec.with_checksum(tables.service, row))


def check_revision(path: Path, connection: Connection) -> None:
    """Raises CatalogError unless the database has the schema of this version."""
    revision = revision_of(connection)
    if revision != tables.HEAD:
        raise CatalogError(
            f"catalog {path}: written by another version of longleaf (schema {revision}; supported: {tables.HEAD}); "
            "`longleaf serve` upgrades an earlier schema"
        )

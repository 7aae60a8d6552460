"""Moves headers of uploads and display names behind a page of padding, as all other client content."""

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op
from blake3 import blake3

revision = "0003"
down_revision = "0002"
PADDING = bytes(4096)
MOVED = {"uploads": ("header", b""), "contexts": ("display_name", "")}
"""The column whose content moves, and the new content."""


def upgrade() -> None:
    for name, (column, nothing) in MOVED.items():
        for new in ("padding", "content"):
            op.add_column(name, sa.Column(new, sa.LargeBinary, nullable=False, server_default=sa.text("x''")))
        connection = op.get_bind()
        before = sa.Table(name, sa.MetaData(), autoload_with=connection)
        for row in connection.execute(sa.select(before)).mappings().all():
            content = row[column].encode() if isinstance(row[column], str) else row[column]
            moved = {column: nothing, "padding": PADDING if content else b"", "content": content}
            if row["checksum"] == _checksum(before, row, {"checksum", "padding", "content"}):  # else it stays damaged
                moved["checksum"] = _checksum(before, {**row, **moved}, {"checksum"})
            key = [before.c[key.name] == row[key.name] for key in before.primary_key.columns]
            connection.execute(sa.update(before).where(*key).values(moved))


def _checksum(table: sa.Table, row: Mapping[Any, Any], without: set[str]) -> bytes:
    values = [row[column.name] for column in table.columns if column.name not in without]
    return blake3(msgspec.msgpack.encode((str(table.name), *values))).digest(length=16)

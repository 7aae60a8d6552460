"""Tables of the catalog after the last migration.

Each row has a checksum over its other columns (coordinator.persistence.catalog.row_codec), because SQLite does not
detect a flipped bit. A change of this file, or of a
record, needs a migration, which signs the rows of changed tables again.
"""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)

from coordinator.persistence.catalog.records import SnapshotRecord, UploadRecord
from longleaf.storage.context_record import ContextRecord

HEAD = "0003"
"""The revision of the last migration."""

metadata = MetaData()


PAGE_BYTES = 4096
TYPES = {str: Text, int: Integer, bool: Integer, float: Float, bytes: LargeBinary, tuple[int, ...]: Text}
"""Column types of the fields of records."""


def _checksum() -> Column[bytes]:
    return Column("checksum", LargeBinary, nullable=False)


def _padding() -> Column[bytes]:
    """PAGE_BYTES zeros before content that must be erased when it is deleted.

    SQLite leaves stale copies of data in tree nodes when it balances them, even with secure_delete. Data behind a whole
    page of a row is on separate overflow pages, which are never copied, and are overwritten when freed.
    """
    return Column("padding", LargeBinary, nullable=False)


def _private() -> tuple[Column[bytes], Column[bytes]]:
    """Columns for larger content and its padding, after all others, in this order."""
    padding, content = (
        Column(name, LargeBinary, nullable=False, server_default=text("x''")) for name in ("padding", "content")
    )
    return padding, content


def _columns(record: type[msgspec.Struct], *others: str) -> Iterator[Column[Any]]:
    """A column for each field of a record except `others`, in their order."""
    for field in msgspec.structs.fields(record):
        if field.name not in others:
            is_optional = type(None) in get_args(field.type)
            kind = get_args(field.type)[0] if is_optional else field.type
            yield Column(field.name, TYPES[kind], nullable=is_optional)


service = Table(
    "service",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("service_id", Text, nullable=False),
    Column("next_segment", Integer, nullable=False),
    Column("next_outgoing", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    _checksum(),
)
"""One row, whose id is 0."""
COUNTERS = ("service_id", "next_segment", "next_outgoing", "epoch")
"""Columns of the row that are fields of CatalogContents."""

segments = Table(
    "segments",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("parent", Integer, ForeignKey("segments.id", deferrable=True, initially="DEFERRED")),
    Column("start", Integer, nullable=False),
    Column("num_tokens", Integer, nullable=False),
    Column("scaled_for", Integer, nullable=False),
    Column("is_double", Integer, nullable=False),
    _checksum(),
    Index("segments_parent", "parent"),
)

segment_ids = Table(
    "segment_ids",
    metadata,
    Column("segment", Integer, ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
    Column("start", Integer, primary_key=True),
    _checksum(),
    _padding(),
    Column("content", LargeBinary, nullable=False),
)
"""Token ids in pieces, little-endian with 4 bytes each; `start` counts from the segment's first token."""

segment_texts = Table(
    "segment_texts",
    metadata,
    Column("segment", Integer, ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
    _checksum(),
    _padding(),
    Column("content", LargeBinary, nullable=False),
)
"""The text of a segment's tokens (longleaf.document_text), if known; in MessagePack."""

contexts = Table(
    "contexts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("segment", Integer, ForeignKey("segments.id", deferrable=True, initially="DEFERRED"), nullable=False),
    *_columns(ContextRecord, "id", "segment"),
    _checksum(),
    *_private(),
    Index("contexts_segment", "segment"),
    sqlite_with_rowid=False,
)
"""The display name is stored as the padded content; early versions used its own column, which is empty now. A context
without a display name has no padding."""

snapshots = Table(
    "snapshots",
    metadata,
    Column("segment", Integer, ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
    *_columns(SnapshotRecord, "segment"),
    _checksum(),
)

uploads = Table(
    "uploads",
    metadata,
    Column("context", Text, primary_key=True),
    Column("upload_id", Text, primary_key=True),
    *_columns(UploadRecord, "context", "upload_id"),
    Column("num_tokens", Integer, nullable=False),
    _checksum(),
    *_private(),
    sqlite_with_rowid=False,
)
"""The header is stored as the padded content; early versions used its own column, which is empty now."""


def _of_upload(name: str) -> Table:
    """Numbers of an upload, in pieces; `start` counts the numbers before a piece."""
    return Table(
        name,
        metadata,
        Column("context", Text, primary_key=True),
        Column("upload_id", Text, primary_key=True),
        Column("start", Integer, primary_key=True),
        _checksum(),
        _padding(),
        Column("content", LargeBinary, nullable=False),
        ForeignKeyConstraint(["context", "upload_id"], ["uploads.context", "uploads.upload_id"], ondelete="CASCADE"),
    )


upload_ids = _of_upload("upload_ids")
"""As `segment_ids`, in pieces of any size."""

upload_starts = _of_upload("upload_starts")
"""Offsets of an upload's tokens in its text, in pieces of any size, little-endian with 8 bytes each."""

outbox = Table(
    "outbox",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    _checksum(),
    _padding(),
    Column("content", LargeBinary),
)
"""Objects to be written to storage; an entry without content deletes the object."""

"""The tables of a catalog, as the last of the migrations leaves them.

Rows carry a checksum of their content: a flipped byte in a value passes all that SQLite checks itself.
"""

from sqlalchemy import Column, ForeignKey, Integer, LargeBinary, MetaData, Table, Text

METADATA = MetaData()

SERVICE = Table(
    "service",
    METADATA,
    Column("service_id", Text, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("next_segment", Integer, nullable=False),
)
"""One row."""

SEGMENTS = Table(
    "segments",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("parent", Integer, ForeignKey("segments.id", deferrable=True, initially="DEFERRED"), index=True),
    Column("content", Text, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
)

TOKEN_IDS = Table(
    "token_ids",
    METADATA,
    Column("segment", Integer, ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("ids", LargeBinary, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
)
"""Of a segment, 65,536 ids in a row, the last one but for fewer: 32-bit numbers, the lowest byte first."""

CONTEXTS = Table(
    "contexts",
    METADATA,
    Column("id", Text, primary_key=True),
    Column(
        "segment",
        Integer,
        ForeignKey("segments.id", deferrable=True, initially="DEFERRED"),
        nullable=False,
        index=True,
    ),
    Column("content", Text, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
)

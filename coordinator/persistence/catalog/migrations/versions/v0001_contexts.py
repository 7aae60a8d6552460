"""Creates the tables of contexts, segments, snapshots, uploads, the outbox and the service."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _make_contexts()
    _make_uploads()
    _make_service()


def _checksum() -> "sa.Column[bytes]":
    return sa.Column("checksum", sa.LargeBinary, nullable=False)


def _make_contexts() -> None:
    op.create_table(
        "segments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer, sa.ForeignKey("segments.id", deferrable=True, initially="DEFERRED")),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("scaled_for", sa.Integer, nullable=False),
        sa.Column("is_double", sa.Integer, nullable=False),
        _checksum(),
    )
    op.create_index("segments_parent", "segments", ["parent"])
    op.create_table(
        "segment_ids",
        sa.Column("segment", sa.Integer, sa.ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("start", sa.Integer, primary_key=True),
        _checksum(),
        sa.Column("padding", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    last = sa.ForeignKey("segments.id", deferrable=True, initially="DEFERRED")
    op.create_table(
        "contexts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("segment", sa.Integer, last, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("ends", sa.Text, nullable=False),
        sa.Column("capacity", sa.Integer, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
        sa.Column("display_name", sa.Text, nullable=False),
        sa.Column("is_pinned", sa.Integer, nullable=False),
        sa.Column("expires", sa.Float),
        sa.Column("last_used", sa.Float, nullable=False),
        sa.Column("num_hits", sa.Integer, nullable=False),
        sa.Column("upload_id", sa.Text, nullable=False),
        _checksum(),
        sqlite_with_rowid=False,
    )
    op.create_index("contexts_segment", "contexts", ["segment"])
    op.create_table(
        "snapshots",
        sa.Column("segment", sa.Integer, sa.ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("form", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.Integer, nullable=False),
        _checksum(),
    )


def _make_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("context", sa.Text, primary_key=True),
        sa.Column("upload_id", sa.Text, primary_key=True),
        sa.Column("header", sa.LargeBinary, nullable=False),
        sa.Column("settled_bytes", sa.Integer, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        _checksum(),
        sqlite_with_rowid=False,
    )
    key = ["context", "upload_id"]
    op.create_table(
        "upload_ids",
        sa.Column("context", sa.Text, primary_key=True),
        sa.Column("upload_id", sa.Text, primary_key=True),
        sa.Column("start", sa.Integer, primary_key=True),
        _checksum(),
        sa.Column("padding", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(key, [f"uploads.{name}" for name in key], ondelete="CASCADE"),
    )


def _make_service() -> None:
    op.create_table(
        "outbox",
        sa.Column("key", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        _checksum(),
        sa.Column("padding", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary),
    )
    op.create_table(
        "service",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("service_id", sa.Text, nullable=False),
        sa.Column("next_segment", sa.Integer, nullable=False),
        sa.Column("next_outgoing", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        _checksum(),
    )

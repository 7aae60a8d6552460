"""Adds the texts of segments and uploads. Older rows have no text."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "segment_texts",
        sa.Column("segment", sa.Integer, sa.ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
        *_content(),
    )
    key = ["context", "upload_id"]
    op.create_table(
        "upload_starts",
        sa.Column("context", sa.Text, primary_key=True),
        sa.Column("upload_id", sa.Text, primary_key=True),
        sa.Column("start", sa.Integer, primary_key=True),
        *_content(),
        sa.ForeignKeyConstraint(key, [f"uploads.{name}" for name in key], ondelete="CASCADE"),
    )


def _content() -> "tuple[sa.Column[bytes], ...]":
    return tuple(sa.Column(name, sa.LargeBinary, nullable=False) for name in ("checksum", "padding", "content"))

"""Contexts, their segments and token ids."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "service",
        sa.Column("service_id", sa.Text, primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("next_segment", sa.Integer, nullable=False),
    )
    op.create_table(
        "segments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer, sa.ForeignKey("segments.id", deferrable=True, initially="DEFERRED")),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("checksum", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_segments_parent", "segments", ["parent"])
    op.create_table(
        "token_ids",
        sa.Column("segment", sa.Integer, sa.ForeignKey("segments.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("ids", sa.LargeBinary, nullable=False),
        sa.Column("checksum", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "contexts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column(
            "segment",
            sa.Integer,
            sa.ForeignKey("segments.id", deferrable=True, initially="DEFERRED"),
            nullable=False,
        ),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("checksum", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_contexts_segment", "contexts", ["segment"])

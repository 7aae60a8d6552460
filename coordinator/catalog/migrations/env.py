"""Runs migrations over the connection that `coordinator.catalog.upgrading` gives."""

from alembic import context

from coordinator.catalog.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()

"""Alembic's entry point: runs the pending migrations on the given connection and in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()

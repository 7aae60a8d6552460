"""What Alembic runs: the steps that are due, on the connection that it is given, in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()

"""Alembic's environment: runs the migrations in the transaction that `Ledger.migrate` opened."""

from alembic import context

from ostinato.infra.platform.ledger.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
)
context.run_migrations()

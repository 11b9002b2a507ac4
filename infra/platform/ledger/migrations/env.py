"""What Alembic runs: the migrations, inside the transaction that `Ledger.migrate` opened."""

from alembic import context

from ostinato.infra.platform.ledger.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()

"""The flow run that works on a cycle, so that a run that starts again after its cycle has closed does not open another."""

import sqlalchemy as sa
from alembic import op

revision: str = "cycle_flow_run"
down_revision: str | None = "token_spending"


def upgrade() -> None:
    """Adds the column. Runs of earlier cycles are not known."""
    column = sa.Column("flow_run_id", sa.String(), nullable=False, server_default="")
    op.add_column("cycles", column)

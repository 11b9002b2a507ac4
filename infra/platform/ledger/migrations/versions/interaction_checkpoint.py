"""Interactions name the checkpoint that answered."""

import sqlalchemy as sa
from alembic import op

revision: str = "interaction_checkpoint"
down_revision: str | None = "one_spine_2"


def upgrade() -> None:
    """Adds the column. It is empty in earlier rows."""
    column = sa.Column("checkpoint_id", sa.String(), nullable=False, server_default="")
    op.add_column("interactions", column)

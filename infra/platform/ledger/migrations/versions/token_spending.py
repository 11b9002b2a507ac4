"""Tokens that accounts of the gateway used, by day."""

import sqlalchemy as sa
from alembic import op

revision: str = "token_spending"
down_revision: str | None = "interaction_checkpoint"


def upgrade() -> None:
    """Adds the table."""
    op.create_table(
        "token_spending",
        sa.Column("account", sa.String(), primary_key=True),
        sa.Column("day", sa.BigInteger(), primary_key=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
    )

"""Champions, interactions and cycles belong to a serving line; runs, which nothing wrote, go.

What was promoted before is kept as the line "champion", which no recipe names.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Forward."""
    op.drop_table("runs")
    op.execute("ALTER TABLE champion RENAME COLUMN slot TO line")
    op.execute("DELETE FROM promotions WHERE state <> 'closed'")
    op.execute("ALTER TABLE promotions DROP COLUMN state")
    for table, column in (
        ("promotions", "line"),
        ("interactions", "line"),
        ("cycles", "line"),
        ("cycles", "served"),
    ):
        op.add_column(table, sa.Column(column, sa.String(), nullable=True))
        op.execute(f"UPDATE {table} SET {column} = '{'champion' if column == 'line' else ''}'")
        with op.batch_alter_table(table) as batch:
            batch.alter_column(column, existing_type=sa.String(), nullable=False)


def downgrade() -> None:
    """Back. Rows keep no line."""
    for table, column in (
        ("cycles", "served"),
        ("cycles", "line"),
        ("interactions", "line"),
        ("promotions", "line"),
    ):
        op.drop_column(table, column)
    op.add_column(
        "promotions", sa.Column("state", sa.String(), nullable=False, server_default="closed")
    )
    op.execute("ALTER TABLE champion RENAME COLUMN line TO slot")
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(), primary_key=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
    )

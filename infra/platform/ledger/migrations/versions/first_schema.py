"""First schema of the ledger."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "one_spine_1"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Forward."""
    _create_events()
    _create_artifacts()
    _create_journal()
    _create_checkpoints()
    _create_interactions()
    _create_cycles()


def downgrade() -> None:
    """Back."""
    for table in (
        "cycles",
        "feedback",
        "interactions",
        "champion",
        "promotions",
        "scorecards",
        "journal",
        "artifact_parents",
        "artifacts",
        "events",
    ):
        op.drop_table(table)


def _text(name: str, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(), nullable=nullable)


def _number(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _real(name: str, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=nullable)


def _json(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.JSON(), nullable=False)


def _row_number(name: str, autoincrement: bool = True) -> sa.Column[int]:
    kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column(name, kind, autoincrement=autoincrement, nullable=False)


def _create_events() -> None:
    op.create_table(
        "events",
        _row_number("event_id"),
        _text("source"),
        _text("name"),
        _json("payload"),
        _real("at"),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("ix_events_source", "events", ["source"])


def _create_artifacts() -> None:
    op.create_table(
        "artifacts",
        _row_number("artifact_id"),
        _text("kind"),
        _text("name"),
        _number("version"),
        _text("fingerprint"),
        _text("object_prefix"),
        _json("payload"),
        _real("created_at"),
        sa.PrimaryKeyConstraint("artifact_id"),
        sa.UniqueConstraint("kind", "name", "fingerprint"),
        sa.UniqueConstraint("kind", "name", "version"),
    )
    op.create_table(
        "artifact_parents",
        _row_number("child_id", autoincrement=False),
        _row_number("parent_id", autoincrement=False),
        sa.ForeignKeyConstraint(["child_id"], ["artifacts.artifact_id"]),
        sa.ForeignKeyConstraint(["parent_id"], ["artifacts.artifact_id"]),
        sa.PrimaryKeyConstraint("child_id", "parent_id"),
    )


def _create_journal() -> None:
    op.create_table(
        "journal",
        _text("trajectory_id"),
        _text("run_id"),
        _text("group_id"),
        _text("problem_id"),
        _number("weight_version"),
        _text("state"),
        _text("outcome", nullable=True),
        _text("reason", nullable=True),
        _real("reward", nullable=True),
        _text("object_key", nullable=True),
        _number("commit_sequence", nullable=True),
        _number("trained_step", nullable=True),
        _json("payload"),
        _real("reserved_at"),
        _real("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("trajectory_id"),
    )
    op.create_index("ix_journal_group_id", "journal", ["group_id"])
    op.create_index("ix_journal_commit_sequence", "journal", ["commit_sequence"])
    op.create_index("ix_journal_run_state", "journal", ["run_id", "state", "commit_sequence"])


def _create_checkpoints() -> None:
    op.create_table(
        "scorecards",
        _text("scorecard_id"),
        _text("checkpoint_id"),
        _text("suite"),
        sa.Column("passed", sa.Boolean(), nullable=True),
        _json("payload"),
        _real("created_at"),
        sa.PrimaryKeyConstraint("scorecard_id"),
    )
    op.create_index("ix_scorecards_checkpoint_id", "scorecards", ["checkpoint_id"])
    op.create_table(
        "promotions",
        _row_number("entry_id"),
        _text("line"),
        _text("action"),
        _text("from_checkpoint_id", nullable=True),
        _text("to_checkpoint_id"),
        _text("scorecard_id", nullable=True),
        _text("reason"),
        _real("at"),
        sa.PrimaryKeyConstraint("entry_id"),
    )
    op.create_table(
        "champion",
        _text("line"),
        _text("checkpoint_id"),
        _text("scorecard_id", nullable=True),
        _number("entry_id"),
        _text("reason"),
        _real("at"),
        sa.PrimaryKeyConstraint("line"),
    )


def _create_interactions() -> None:
    op.create_table(
        "interactions",
        _row_number("sequence"),
        _text("interaction_id"),
        _text("line"),
        _text("tenant"),
        _text("session_id"),
        _text("arm"),
        _number("weight_version"),
        _text("problem_kind"),
        sa.Column("consent", sa.Boolean(), nullable=False),
        _text("object_key"),
        _real("created_at"),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("interaction_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_interactions_session_id", "interactions", ["session_id"])
    op.create_table(
        "feedback",
        _text("feedback_id"),
        _text("interaction_id"),
        _text("signal"),
        _real("value"),
        _real("created_at"),
        sa.ForeignKeyConstraint(["interaction_id"], ["interactions.interaction_id"]),
        sa.PrimaryKeyConstraint("feedback_id"),
    )
    op.create_index("ix_feedback_interaction_id", "feedback", ["interaction_id"])


def _create_cycles() -> None:
    op.create_table(
        "cycles",
        _text("cycle_id"),
        _text("line"),
        _text("served"),
        _number("from_watermark"),
        _number("to_watermark"),
        _text("outcome", nullable=True),
        _json("stages"),
        _real("opened_at"),
        _real("closed_at", nullable=True),
        sa.PrimaryKeyConstraint("cycle_id"),
    )

"""First schema of the ledger."""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "one_spine_2"
down_revision: str | None = None

_NUMBERED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Creates all tables."""
    _create_events()
    _create_artifacts()
    _create_journal()
    _create_checkpoints()
    _create_interactions()
    _create_cycles()


def _columns(kind: Any, *names: str, nullable: bool = False) -> Iterator[sa.Column[Any]]:
    return (sa.Column(name, kind, nullable=nullable) for name in names)


def _text(*names: str, nullable: bool = False) -> Iterator[sa.Column[Any]]:
    return _columns(sa.String(), *names, nullable=nullable)


def _create_events() -> None:
    op.create_table(
        "events",
        *_columns(_NUMBERED, "event_id"),
        *_text("source", "name"),
        *_columns(sa.JSON(), "payload"),
        *_columns(sa.Double(), "at"),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("ix_events_source", "events", ["source"])


def _create_artifacts() -> None:
    op.create_table(
        "artifacts",
        *_columns(_NUMBERED, "artifact_id"),
        *_text("kind", "name", "fingerprint", "object_prefix"),
        *_columns(sa.BigInteger(), "version"),
        *_columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("artifact_id"),
        sa.UniqueConstraint("kind", "name", "fingerprint"),
        sa.UniqueConstraint("kind", "name", "version"),
    )
    op.create_table(
        "artifact_parents",
        *_columns(sa.BigInteger(), "child_id", "parent_id"),
        sa.ForeignKeyConstraint(["child_id"], ["artifacts.artifact_id"]),
        sa.ForeignKeyConstraint(["parent_id"], ["artifacts.artifact_id"]),
        sa.PrimaryKeyConstraint("child_id", "parent_id"),
    )


def _create_journal() -> None:
    op.create_table(
        "journal",
        *_text("trajectory_id", "run_id", "group_id", "problem_id", "state"),
        *_text("outcome", "reason", "object_key", nullable=True),
        *_columns(sa.BigInteger(), "weight_version"),
        *_columns(sa.BigInteger(), "commit_sequence", "trained_step", nullable=True),
        *_columns(sa.Double(), "reserved_at"),
        *_columns(sa.Double(), "reward", "finished_at", nullable=True),
        sa.PrimaryKeyConstraint("trajectory_id"),
    )
    op.create_index("ix_journal_group_id", "journal", ["group_id"])
    op.create_index("ix_journal_commit_sequence", "journal", ["commit_sequence"])
    op.create_index("ix_journal_run_state", "journal", ["run_id", "state", "commit_sequence"])


def _create_checkpoints() -> None:
    op.create_table(
        "scorecards",
        *_text("scorecard_id", "checkpoint_id", "suite"),
        *_columns(sa.Boolean(), "passed", nullable=True),
        *_columns(sa.JSON(), "payload"),
        *_columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("scorecard_id"),
    )
    op.create_index("ix_scorecards_checkpoint_id", "scorecards", ["checkpoint_id"])
    op.create_table(
        "promotions",
        *_columns(_NUMBERED, "entry_id"),
        *_text("line", "action", "checkpoint_id", "reason"),
        *_text("scorecard_id", nullable=True),
        *_columns(sa.Double(), "at"),
        sa.PrimaryKeyConstraint("entry_id"),
    )


def _create_interactions() -> None:
    op.create_table(
        "interactions",
        *_columns(_NUMBERED, "sequence"),
        *_text("interaction_id", "line", "tenant", "session_id", "arm", "problem_kind"),
        *_text("object_key"),
        *_columns(sa.BigInteger(), "weight_version"),
        *_columns(sa.Boolean(), "consent"),
        *_columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("interaction_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "feedback",
        *_text("feedback_id", "interaction_id", "signal"),
        *_columns(sa.Double(), "value", "created_at"),
        sa.ForeignKeyConstraint(["interaction_id"], ["interactions.interaction_id"]),
        sa.PrimaryKeyConstraint("feedback_id"),
    )
    op.create_index("ix_feedback_interaction_id", "feedback", ["interaction_id"])


def _create_cycles() -> None:
    op.create_table(
        "cycles",
        *_text("cycle_id", "line", "served"),
        *_columns(sa.BigInteger(), "from_watermark", "to_watermark"),
        *_text("outcome", nullable=True),
        *_columns(sa.JSON(), "stages"),
        *_columns(sa.Double(), "opened_at"),
        *_columns(sa.Double(), "closed_at", nullable=True),
        sa.PrimaryKeyConstraint("cycle_id"),
    )

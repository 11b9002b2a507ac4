"""Tables of the ledger as typed SQLAlchemy models.

The schema; a change here needs a migration beside it. Instants are seconds since the epoch. The
ledger stores ids, numbers, JSON and object keys: it never learns what a Trajectory or a Problem is.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, Integer, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite only numbers rows by itself in a column that is exactly INTEGER
RowNumber = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Declarative base with the column types."""

    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        int: BigInteger,
        float: Double,
        dict[str, Any]: JSON,
    }


class ArtifactTable(Base):
    """Index of published artifacts. The bytes and artifact.json are in the object store."""

    __tablename__ = "artifacts"
    artifact_id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    kind: Mapped[str]
    name: Mapped[str]
    version: Mapped[int]
    fingerprint: Mapped[str]
    object_prefix: Mapped[str]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    __table_args__ = (
        UniqueConstraint("kind", "name", "version"),
        UniqueConstraint("kind", "name", "fingerprint"),
    )


class ArtifactParentTable(Base):
    """One edge of lineage."""

    __tablename__ = "artifact_parents"
    child_id: Mapped[int] = mapped_column(ForeignKey("artifacts.artifact_id"), primary_key=True)
    parent_id: Mapped[int] = mapped_column(ForeignKey("artifacts.artifact_id"), primary_key=True)


class JournalTable(Base):
    """One dispatched trajectory: reserved, finished, committed, trained or discarded."""

    __tablename__ = "journal"
    trajectory_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    group_id: Mapped[str] = mapped_column(index=True)
    problem_id: Mapped[str]
    weight_version: Mapped[int]
    state: Mapped[str]
    outcome: Mapped[str | None]
    reason: Mapped[str | None]
    reward: Mapped[float | None]
    object_key: Mapped[str | None]
    commit_sequence: Mapped[int | None] = mapped_column(index=True)
    trained_step: Mapped[int | None]
    payload: Mapped[dict[str, Any]]
    reserved_at: Mapped[float]
    finished_at: Mapped[float | None]
    __table_args__ = (Index("ix_journal_run_state", "run_id", "state", "commit_sequence"),)


class ScorecardTable(Base):
    """One checkpoint measured on one suite."""

    __tablename__ = "scorecards"
    scorecard_id: Mapped[str] = mapped_column(primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(index=True)
    suite: Mapped[str]
    passed: Mapped[bool | None]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class PromotionTable(Base):
    """One change of the champion of a serving line."""

    __tablename__ = "promotions"
    entry_id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    line: Mapped[str]
    action: Mapped[str]
    from_checkpoint_id: Mapped[str | None]
    to_checkpoint_id: Mapped[str]
    scorecard_id: Mapped[str | None]
    reason: Mapped[str]
    at: Mapped[float]


class ChampionTable(Base):
    """Checkpoint that serves the users of a line."""

    __tablename__ = "champion"
    line: Mapped[str] = mapped_column(primary_key=True)
    checkpoint_id: Mapped[str]
    scorecard_id: Mapped[str | None]
    entry_id: Mapped[int]
    reason: Mapped[str]
    at: Mapped[float]


class InteractionTable(Base):
    """One user turn with a deployed checkpoint. `sequence` is the watermark."""

    __tablename__ = "interactions"
    sequence: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    interaction_id: Mapped[str] = mapped_column(unique=True)
    line: Mapped[str]
    tenant: Mapped[str]
    session_id: Mapped[str] = mapped_column(index=True)
    arm: Mapped[str]
    weight_version: Mapped[int]
    problem_kind: Mapped[str]
    consent: Mapped[bool]
    object_key: Mapped[str]
    created_at: Mapped[float]
    __table_args__ = ({"sqlite_autoincrement": True},)


class FeedbackTable(Base):
    """One signal about one interaction."""

    __tablename__ = "feedback"
    feedback_id: Mapped[str] = mapped_column(primary_key=True)
    interaction_id: Mapped[str] = mapped_column(
        ForeignKey("interactions.interaction_id"), index=True
    )
    signal: Mapped[str]
    value: Mapped[float]
    created_at: Mapped[float]


class CycleTable(Base):
    """One real-time round over a line's interactions in (from_watermark, to_watermark]."""

    __tablename__ = "cycles"
    cycle_id: Mapped[str] = mapped_column(primary_key=True)
    line: Mapped[str]
    served: Mapped[str]
    from_watermark: Mapped[int]
    to_watermark: Mapped[int]
    outcome: Mapped[str | None]
    stages: Mapped[dict[str, Any]]
    opened_at: Mapped[float]
    closed_at: Mapped[float | None]


class EventTable(Base):
    """Event or wait, for `ostinato status`."""

    __tablename__ = "events"
    event_id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    source: Mapped[str] = mapped_column(index=True)
    name: Mapped[str]
    payload: Mapped[dict[str, Any]]
    at: Mapped[float]

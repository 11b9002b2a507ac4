"""Rows of the ledger as frozen records. Instants are seconds since the epoch."""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Row(BaseModel):
    """Base of all rows."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", from_attributes=True, allow_inf_nan=False
    )


class ArtifactRow(Row):
    """One published artifact."""

    artifact_id: int
    kind: str
    name: str
    version: int
    fingerprint: str
    object_prefix: str
    created_at: float


class LineageRow(Row):
    """One edge of lineage."""

    child_id: int
    parent_id: int


class JournalState(StrEnum):
    """State of a trajectory on its way to being trained."""

    RESERVED = "reserved"  # dispatched, nothing known
    FINISHED = "finished"  # has an outcome; its group is not complete
    COMMITTED = "committed"  # its group is complete and waits for the trainer
    TRAINED = "trained"
    DISCARDED = "discarded"  # its group will never be trained, with a reason


class JournalRow(Row):
    """One dispatched trajectory."""

    trajectory_id: str
    run_id: str
    group_id: str
    problem_id: str
    weight_version: int
    state: JournalState
    outcome: str | None = Field(description="outcome of the attempt; None while reserved")
    reason: str | None
    reward: float | None
    object_key: str | None
    commit_sequence: int | None = Field(description="order in which groups were committed")
    trained_step: int | None
    reserved_at: float
    finished_at: float | None


class ScorecardRow(Row):
    """One checkpoint measured on one suite."""

    scorecard_id: str
    checkpoint_id: str
    suite: str
    passed: bool | None = Field(
        default=None, description="decision of the gate; None: no gate was applied"
    )
    payload: dict[str, Any]
    created_at: float


class PromotionRow(Row):
    """One change of a line's champion. The newest row names the checkpoint that serves."""

    entry_id: int
    line: str
    action: str = Field(description="kind of change: promote or roll_back")
    checkpoint_id: str
    scorecard_id: str | None
    reason: str
    at: float


class FeedbackRow(Row):
    """One signal about one interaction."""

    feedback_id: str
    interaction_id: str
    signal: str
    value: float
    created_at: float


class NewInteraction(Row):
    """One user turn with a deployed checkpoint."""

    interaction_id: str
    line: str = Field(description="serving line of the gateway that answered")
    tenant: str
    session_id: str
    arm: str
    checkpoint_id: str = Field(
        description="checkpoint that answered; empty in rows older than the column"
    )
    weight_version: int
    problem_kind: str
    consent: bool
    object_key: str
    created_at: float


class InteractionRow(NewInteraction):
    """One user turn with all feedback on it so far."""

    sequence: int = Field(
        description="position in commit order, which readers keep as their watermark"
    )
    feedback: tuple[FeedbackRow, ...] = ()


class CycleRow(Row):
    """One real-time round over a line's interactions in (from_watermark, to_watermark]."""

    cycle_id: str
    line: str
    served: str = Field(
        description="checkpoint that the cycle trains on: the champion when it opened"
    )
    from_watermark: int
    to_watermark: int
    outcome: str | None = Field(default=None, description="outcome of the round; None while open")
    stages: dict[str, Any] = Field(default={}, description="payload of each finished stage")
    opened_at: float
    closed_at: float | None = None
    flow_run_id: str = Field(
        default="", description="flow run that works on the cycle, or last did; empty: not known"
    )


class SpendingRow(Row):
    """Tokens that an account of the gateway used on one day, at all gateways of the ledger."""

    account: str
    day: int = Field(description="days since 1970 (UTC)")
    tokens: int


class EventRow(Row):
    """One event."""

    event_id: int
    source: str
    name: str
    payload: dict[str, Any]
    at: float

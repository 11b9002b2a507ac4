"""The words in which users speak: feedback signals and the interactions they belong to.

Owns Signal, FeedbackEvent, CollectedInteraction, Skip and Collection. It reads and judges nothing.
"""

from enum import StrEnum

from pydantic import Field

from infra.harness.transcript import Transcript
from tasks.records import Record


class Signal(StrEnum):
    """What a client may report about an interaction; `value` in brackets."""

    EDIT_KEPT = "edit_kept"  # the edit was accepted (1)
    EDIT_REVERTED = "edit_reverted"  # the edit was undone (1)
    EDIT_SURVIVED = "edit_survived"  # share of the edit's lines still there later (0..1)
    DISSATISFIED_FOLLOW_UP = "dissatisfied_follow_up"  # the next message complains about this answer (1)
    ABANDONED = "abandoned"  # the user left before looking (1)
    THUMBS_UP = "thumbs_up"  # (1)
    THUMBS_DOWN = "thumbs_down"  # (1)
    LATENCY_SECONDS = "latency_seconds"  # how long the user waited (seconds); the gateway adds it itself


class FeedbackEvent(Record):
    """One signal."""

    signal: Signal
    value: float
    created_at: float


class CollectedInteraction(Record):
    """One user turn with a deployed checkpoint, its tokens and all that was said about it."""

    interaction_id: str
    session_id: str
    population: str = Field(description="the tenant whose users these are")
    problem_kind: str
    arm: str
    weight_version: int
    created_at: float
    transcript: Transcript
    feedback: tuple[FeedbackEvent, ...]


class SkipReason(StrEnum):
    """Why an interaction is not trained on. A bad answer is never a reason."""

    INFRASTRUCTURE = "infrastructure"  # the engine or the sandbox failed: says nothing about the policy
    NOTHING_SAMPLED = "nothing_sampled"  # no token of the model in it
    STALE = "stale"  # made by weights too far from those that would be trained
    TRANSCRIPT_LOST = "transcript_lost"  # the object store no longer has its bytes


class Skip(Record):
    """An interaction left out, with the reason."""

    interaction_id: str
    reason: SkipReason
    detail: str


class Collection(Record):
    """All interactions in (from_watermark, to_watermark]; every one is in exactly one of the two lists."""

    from_watermark: int
    to_watermark: int
    interactions: tuple[CollectedInteraction, ...]
    skipped: tuple[Skip, ...]

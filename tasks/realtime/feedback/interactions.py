"""Interactions as the cycle sees them: tokens, and what users said about them."""

from enum import StrEnum

from pydantic import Field

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.ledger.rows import FeedbackRow, NewInteraction
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.tasks.records import StageRecord


class Source(StrEnum):
    """Kind of user behind an interaction. A cycle trains on one kind alone."""

    PEOPLE = "people"
    SIMULATED = "simulated"


def source_of(interaction: NewInteraction) -> Source:
    """Simulated users have a tenant of their own, of which nobody else gets a key."""
    return Source.SIMULATED if interaction.tenant == SIMULATED_TENANT else Source.PEOPLE


class CollectedInteraction(StageRecord):
    """One user turn with a deployed checkpoint, its tokens and all that was said about it."""

    interaction_id: str
    population: str = Field(description="the tenant whose users these are")
    problem_kind: str
    transcript: Transcript
    feedback: tuple[FeedbackRow, ...]


class Window(StageRecord):
    """Interactions and feedback of a line that one cycle reads."""

    line: str
    served: str = Field(description="checkpoint that the cycle trains on")
    from_watermark: int
    to_watermark: int
    said_after: float
    """feedback on earlier interactions counts from here on: when the cycle before opened"""
    said_until: float = Field(description="time at which this cycle opened")
    source: Source = Field(default=Source.PEOPLE, description="interactions of others are left out")


class SkipReason(StrEnum):
    """Reason not to train on an interaction. A bad answer is never one."""

    # engine or sandbox failed, which says nothing about the policy
    INFRASTRUCTURE = "infrastructure"
    NOTHING_SAMPLED = "nothing_sampled"  # no token of the model in it
    OTHER_CHECKPOINT = "other_checkpoint"  # off-policy: another one answered than is trained
    OTHER_SOURCE = "other_source"  # people's in a cycle of simulated users, or theirs in people's
    TRUNCATED_SAMPLING = "truncated_sampling"  # greedy, top-p or top-k: not drawn from the policy
    TRANSCRIPT_LOST = "transcript_lost"  # the object store no longer has its bytes


class Skip(StageRecord):
    """An interaction left out, with the reason."""

    interaction_id: str
    reason: SkipReason
    detail: str


class Collection(StageRecord):
    """Interactions of a window, each in exactly one of the two lists."""

    window: Window
    interactions: tuple[CollectedInteraction, ...]
    skipped: tuple[Skip, ...]

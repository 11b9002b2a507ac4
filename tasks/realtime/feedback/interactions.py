"""Records of interactions in a cycle: tokens and users' feedback."""

from collections.abc import Sequence
from enum import StrEnum

from pydantic import Field

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.ledger.rows import FeedbackRow, NewInteraction
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS, is_informative
from ostinato.tasks.records import StageRecord


class Source(StrEnum):
    """Kind of user behind an interaction. A cycle trains on one kind only."""

    PEOPLE = "people"
    SIMULATED = "simulated"


def source_of(interaction: NewInteraction) -> Source:
    """Source of an interaction. Simulated users have their own tenant, and nobody else gets a key of it."""
    return Source.SIMULATED if interaction.tenant == SIMULATED_TENANT else Source.PEOPLE


def latest_signals(feedback: Sequence[FeedbackRow]) -> dict[str, FeedbackRow]:
    """The newest event of each signal, without those that were withdrawn."""
    latest = {event.signal: event for event in sorted(feedback, key=lambda event: event.created_at)}
    return {name: event for name, event in latest.items() if is_informative(name, event.value)}


def is_judged(feedback: Sequence[FeedbackRow]) -> bool:
    """Whether the user has said something about the answer. The gateway's own measurements say nothing."""
    return bool(latest_signals(feedback).keys() - GATEWAY_SIGNALS)


class CollectedInteraction(StageRecord):
    """One user's turn with a deployed checkpoint, its tokens and its feedback."""

    interaction_id: str
    session_id: str
    sequence: int = Field(description="position in commit order")
    population: str = Field(description="tenant of the user")
    problem_kind: str
    transcript: Transcript
    feedback: tuple[FeedbackRow, ...]


class Window(StageRecord):
    """Interactions and feedback of a line that one cycle reads."""

    line: str
    served: str = Field(description="checkpoint that the cycle trains on")
    from_watermark: int
    to_watermark: int
    feedback_after: float
    """time after which feedback on earlier interactions counts: when the previous cycle opened"""
    feedback_until: float = Field(description="time at which this cycle opened")
    source: Source = Field(default=Source.PEOPLE, description="kind of users; others are left out")


class SkipReason(StrEnum):
    """Reason not to train on an interaction. A bad answer is no such reason."""

    # engine or sandbox failed, which says nothing about the policy
    INFRASTRUCTURE = "infrastructure"
    NOTHING_SAMPLED = "nothing_sampled"  # it holds no token of the model
    OTHER_CHECKPOINT = "other_checkpoint"  # off-policy: another checkpoint answered
    OTHER_SOURCE = "other_source"  # people in a cycle of simulated users, or the reverse
    TRUNCATED_SAMPLING = (
        "truncated_sampling"  # greedy, top-p or top-k: not the policy's distribution
    )
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

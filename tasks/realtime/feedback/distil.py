"""Conversion of users' feedback to trainable samples: reward with a reason, baseline, advantage.

There is one rollout per prompt, so there is no group mean. The baseline of (population, problem kind)
replaces it, and the update is REINFORCE.
"""

from collections.abc import Sequence

from pydantic import Field

from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.transcript import MODEL_FAULTS, CallStatus, EndReason, Transcript
from ostinato.infra.platform.ledger.rows import FeedbackRow
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS, Signal
from ostinato.tasks.realtime.config import DistilConfig, FeedbackConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines, DistilledReward, advantages
from ostinato.tasks.realtime.feedback.interactions import CollectedInteraction, latest_signals
from ostinato.tasks.realtime.feedback.sessions import find_judged
from ostinato.tasks.records import Sample, StageRecord

LIMIT_REASONS = frozenset(
    {
        EndReason.TURN_LIMIT,
        EndReason.TOKEN_LIMIT,
        EndReason.BROKEN_CALLS,
        EndReason.TIMED_OUT,
        EndReason.BOX_RUINED,
    }
)
NO_FEEDBACK = "no_feedback"


class Distilled(StageRecord):
    """Batch of a cycle."""

    samples: tuple[Sample, ...]
    rewards: tuple[DistilledReward, ...]
    baselines: Baselines = Field(description="baselines to carry into the next cycle")
    mean_reward: float
    mean_absolute_advantage: float


def distil_reward(
    interaction: CollectedInteraction, judged: CollectedInteraction, config: DistilConfig
) -> DistilledReward:
    """Adds up the terms of one interaction, with the feedback on `judged`. Latency is always its own.

    Only the latest event of a signal counts, so that reporting it twice changes nothing. A reverted
    edit overrides an earlier "kept". A value below 1 counts proportionally.
    """
    own = [event for event in interaction.feedback if event.signal in GATEWAY_SIGNALS]
    said = [event for event in judged.feedback if event.signal not in GATEWAY_SIGNALS]
    kind, transcript = interaction.problem_kind, interaction.transcript
    reward, terms = reward_of(transcript, kind, [*own, *said], config)
    reason = max(terms, key=lambda name: (abs(terms[name]), name))
    return DistilledReward(
        interaction_id=interaction.interaction_id,
        judged_id=judged.interaction_id,
        population=interaction.population,
        problem_kind=interaction.problem_kind,
        reward=reward,
        reason=reason,
        terms=terms,
    )


def reward_of(
    transcript: Transcript, problem_kind: str, feedback: Sequence[FeedbackRow], config: DistilConfig
) -> tuple[float, dict[str, float]]:
    """Reward of an answer in -1..1, and its terms by name."""
    terms = _feedback_terms(feedback, config)
    if not terms.keys() - {"latency"}:
        terms[NO_FEEDBACK] = config.weights.no_feedback
    terms |= _transcript_terms(transcript, problem_kind, config)
    return max(-1.0, min(1.0, sum(terms.values()))), terms


def distil(
    interactions: Sequence[CollectedInteraction], baselines: Baselines, config: FeedbackConfig
) -> Distilled:
    """One Sample per segment. The segments of an interaction share its advantage."""
    rewards = [
        distil_reward(interaction, interactions[judged], config.distil)
        for interaction, judged in zip(interactions, find_judged(interactions), strict=True)
    ]
    centred = advantages(rewards, baselines)
    samples = tuple(
        Sample(
            sample_id=f"{interaction.interaction_id}/{index}",
            trajectory_id=interaction.interaction_id,
            segment=segment,
            advantage=advantage,
            reward=reward.reward,
        )
        for interaction, reward, advantage in zip(interactions, rewards, centred, strict=True)
        for index, segment in enumerate(interaction.transcript.segments)
        if segment.sampled_tokens
    )
    count = max(1, len(rewards))
    return Distilled(
        samples=samples,
        rewards=tuple(rewards),
        baselines=baselines.absorb(rewards, config.baseline),
        mean_reward=sum(reward.reward for reward in rewards) / count,
        mean_absolute_advantage=sum(abs(value) for value in centred) / count,
    )


def _feedback_terms(feedback: Sequence[FeedbackRow], config: DistilConfig) -> dict[str, float]:
    weights = config.weights
    latest = latest_signals(feedback)
    kept, reverted = latest.get(Signal.EDIT_KEPT), latest.get(Signal.EDIT_REVERTED)
    if kept is not None and reverted is not None:
        # the later of the two counts
        latest.pop(
            Signal.EDIT_KEPT if reverted.created_at >= kept.created_at else Signal.EDIT_REVERTED
        )
    weight_by_signal = weights.model_dump()
    terms: dict[str, float] = {}
    for name, event in latest.items():
        signal = Signal(name)
        share = max(0.0, min(1.0, event.value))
        match signal:
            case Signal.EDIT_SURVIVED:
                terms[signal.value] = weights.edit_survived * (2 * share - 1)
            case Signal.LATENCY_SECONDS:
                excess = event.value / config.latency_target_seconds - 1
                if excess > 0:
                    terms["latency"] = weights.latency * min(1.0, excess)
            case Signal.GENERATED_TOKENS:
                pass  # the guard's measure, no reward
            case _:
                terms[signal.value] = weight_by_signal[signal.value] * share
    return terms


def _transcript_terms(
    transcript: Transcript, problem_kind: str, config: DistilConfig
) -> dict[str, float]:
    weights = config.weights
    calls = [call for turn in transcript.turns for call in turn.calls]
    terms: dict[str, float] = {}
    broken = sum(call.status in MODEL_FAULTS for call in calls)
    if broken:
        terms["broken_calls"] = weights.broken_calls * broken / len(calls)
    edited = any(call.tool in EDIT_TOOLS and call.status is CallStatus.OK for call in calls)
    if not edited and problem_kind not in config.kinds_without_edits:
        terms["no_edit"] = weights.no_edit
    if transcript.end_reason in LIMIT_REASONS:
        terms["unfinished"] = weights.unfinished
    return terms

"""From graded groups to samples with advantages.

A_i = R_i - mean_j R_j within a group, the same for every token of all segments of a trajectory (Dr.
GRPO, Liu et al. 2025, arXiv:2503.20783); GRPO's divisions by the standard deviation and by the
length (Shao et al. 2024, arXiv:2402.03300) are options. The KL penalty is part of the reward. It
drops nothing: refusals, broken and timed-out attempts count with the reward they were given.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pstdev

import numpy as np

from ostinato.infra.agent.transcript import Segment
from ostinato.tasks.records import Group, Sample, Trajectory
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig


def center_rewards(rewards: Sequence[float]) -> list[float]:
    """Rewards less their mean. Exactly zero everywhere when all are equal."""
    if not rewards:
        return []
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def trained_members(group: Group) -> list[Trajectory]:
    """The group's trajectories without those that were only begun for others to branch off."""
    return [member for member in group.trajectories if not member.is_context_only]


def trained_segments(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Its segments, of a forked group with the loss on what follows the branch alone."""
    segments = trajectory.transcript.segments
    if trajectory.branch is None or not segments:
        return segments
    return (cut_loss(trajectory, 0, segments[0]), *segments[1:])


def cut_loss(trajectory: Trajectory, number: int, segment: Segment) -> Segment:
    """A segment of that number without loss on tokens before the branch, if there is one."""
    if trajectory.branch is None or number:
        return segment
    start = trajectory.transcript.opening_tokens(trajectory.branch.turns)
    mask_T = segment.loss_mask_T & (np.arange(len(segment.loss_mask_T)) >= start)
    return segment.model_copy(update={"loss_mask_T": mask_T})


def advantages_of(
    rewards: Sequence[float], lengths: Sequence[int], objective: ObjectiveConfig
) -> list[float]:
    """Advantage of each trajectory of a group, with the divisions that the objective names. `lengths`:
    their sampled tokens.
    """
    advantages = center_rewards(rewards)
    if objective.divide_by_deviation and any(advantages):
        deviation = pstdev(rewards)
        advantages = [advantage / deviation for advantage in advantages]
    if objective.divide_by_length:
        # an attempt without a sampled token has no loss, whatever its advantage
        counted = [max(1, length) for length in lengths]
        mean = math.fsum(counted) / len(counted)
        advantages = [
            advantage * mean / length for advantage, length in zip(advantages, counted, strict=True)
        ]
    return advantages


def make_sample(
    group: Group, trajectory: Trajectory, part: str, segment: Segment, advantage: float
) -> Sample:
    """The sample of one part of a trajectory."""
    return Sample(
        sample_id=f"{trajectory.trajectory_id}/{part}",
        trajectory_id=trajectory.trajectory_id,
        group_id=group.group_id,
        segment=segment,
        advantage=advantage,
        reward=trajectory.reward.total,
    )


def make_samples(group: Group, objective: ObjectiveConfig) -> tuple[Sample, ...]:
    """One sample per segment of every trajectory of the group."""
    members = trained_members(group)
    segments = [trained_segments(member) for member in members]
    advantages = advantages_of(
        [member.reward.total for member in members],
        [sum(segment.sampled_tokens for segment in own) for own in segments],
        objective,
    )
    return tuple(
        make_sample(group, trajectory, str(index), segment, advantage)
        for trajectory, own, advantage in zip(members, segments, advantages, strict=True)
        for index, segment in enumerate(own)
    )


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """Advantages after the penalty, parallel to the samples, and what was taken off on average."""

    advantages: list[float]
    mean_k1_nats: float


def penalize_divergence(
    samples: Sequence[Sample], k1_nats: Sequence[float], objective: ObjectiveConfig
) -> KlPenalty:
    """Takes the objective's coefficient * k1 off each trajectory's reward, and centres and divides again within its
    group.

    `k1_nats` is parallel to `samples`: the sum over sampled tokens of log q(rollout) - log p(reference). k1 in the
    reward, detached, regularises; as a loss its gradient would be zero on average.
    """
    by_trajectory: dict[str, float] = defaultdict(float)
    groups: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample, k1 in zip(samples, k1_nats, strict=True):
        by_trajectory[sample.trajectory_id] += k1
        groups[sample.group_id][sample.trajectory_id].append(sample)
    divides = objective.divide_by_deviation or objective.divide_by_length
    found: dict[str, float] = {}  # by trajectory: its advantage where divided, else its penalty
    for group in groups.values():
        k1s = [by_trajectory[trajectory_id] for trajectory_id in group]
        own = (
            _divide_again(list(group.values()), k1s, objective) if divides else center_rewards(k1s)
        )
        found |= dict(zip(group, own, strict=True))
    return KlPenalty(
        advantages=[
            found[sample.trajectory_id]
            if divides  # whole attempts; otherwise parts may have advantages of their own
            else sample.advantage - objective.kl_coefficient * found[sample.trajectory_id]
            for sample in samples
        ],
        mean_k1_nats=math.fsum(by_trajectory.values()) / max(1, len(by_trajectory)),
    )


def _divide_again(
    group: Sequence[Sequence[Sample]], k1_nats: Sequence[float], objective: ObjectiveConfig
) -> list[float]:
    """Advantages of a group's trajectories, each given by its samples, from their penalised rewards. Every member has
    a sample: groups are without attempts lost to infrastructure, and any other has a segment.
    """
    rewards = [
        own[0].reward - objective.kl_coefficient * k1
        for own, k1 in zip(group, k1_nats, strict=True)
    ]
    lengths = [sum(sample.segment.sampled_tokens for sample in own) for own in group]
    return advantages_of(rewards, lengths, objective)

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
from ostinato.tasks.learning.config import ObjectiveConfig
from ostinato.tasks.records import Group, Sample, Trajectory


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


def advantages_of(members: Sequence[Trajectory], objective: ObjectiveConfig) -> list[float]:
    """Advantage of each trajectory of a group, with the divisions that the objective names."""
    rewards = [trajectory.reward.total for trajectory in members]
    advantages = center_rewards(rewards)
    if objective.divide_by_deviation and any(advantages):
        deviation = pstdev(rewards)
        advantages = [advantage / deviation for advantage in advantages]
    if objective.divide_by_length:
        # an attempt without a sampled token has no loss, whatever its advantage
        lengths = [
            max(1, sum(segment.sampled_tokens for segment in trained_segments(member)))
            for member in members
        ]
        mean = math.fsum(lengths) / len(lengths)
        advantages = [
            advantage * mean / length for advantage, length in zip(advantages, lengths, strict=True)
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
    return tuple(
        make_sample(group, trajectory, str(index), segment, advantage)
        for trajectory, advantage in zip(members, advantages_of(members, objective), strict=True)
        for index, segment in enumerate(trained_segments(trajectory))
    )


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """Advantages after the penalty, parallel to the samples, and what was taken off on average."""

    advantages: list[float]
    mean_k1_nats: float


def penalize_divergence(
    samples: Sequence[Sample], k1_nats: Sequence[float], coefficient: float
) -> KlPenalty:
    """Takes coefficient * k1 off each trajectory's reward and centres again within its group.

    `k1_nats` is parallel to `samples`: the sum over sampled tokens of log q(rollout) - log p(reference). k1 in the
    reward, detached, regularises; as a loss its gradient would be zero on average.
    """
    by_trajectory: dict[str, float] = defaultdict(float)
    group_of: dict[str, str] = {}
    for sample, k1 in zip(samples, k1_nats, strict=True):
        by_trajectory[sample.trajectory_id] += k1
        group_of[sample.trajectory_id] = sample.group_id
    members: dict[str, list[str]] = defaultdict(list)
    for trajectory_id, group_id in group_of.items():
        members[group_id].append(trajectory_id)
    penalty: dict[str, float] = {}
    for trajectory_ids in members.values():
        centred = center_rewards([by_trajectory[trajectory_id] for trajectory_id in trajectory_ids])
        penalty |= dict(zip(trajectory_ids, centred, strict=True))
    return KlPenalty(
        advantages=[
            sample.advantage - coefficient * penalty[sample.trajectory_id] for sample in samples
        ],
        mean_k1_nats=math.fsum(by_trajectory.values()) / max(1, len(by_trajectory)),
    )

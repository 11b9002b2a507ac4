"""Advantages of the samples of graded groups.

A_i = R_i - mean_j R_j within a group, the same for every token of all segments of a trajectory (Dr.
GRPO, Liu et al. 2025, arXiv:2503.20783). GRPO's divisions by the standard deviation and by the
length (Shao et al. 2024, arXiv:2402.03300) are options. The KL penalty is part of the reward. No
attempt is dropped: refusals, broken and timed-out attempts count with the reward they were given.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pstdev

import numpy as np

from ostinato.infra.agent.transcript import Segment
from ostinato.infra.platform.errors import GradingError
from ostinato.infra.platform.plugins import bounded_number
from ostinato.tasks.records import Group, Sample, Trajectory
from ostinato.tasks.reinforcement.learning.config import ADVANTAGES, GROUP_MEAN, ObjectiveConfig

# Relative difference of equal rewards whose terms were added in other steps. Divided by the deviation of such a group, it
# would count as much as a solved problem.
ROUNDING = 1e-13
_NO_TOKENS = Segment(
    token_ids_T=np.zeros(0, dtype=np.int32),
    loss_mask_T=np.zeros(0, dtype=bool),
    logprobs_T=np.zeros(0, dtype=np.float32),
    weight_versions_T=np.zeros(0, dtype=np.int64),
    cache_versions_T=np.zeros(0, dtype=np.int64),
    routed_experts_TLK=np.zeros((0, 0, 0), dtype=np.int16),
)


def center_rewards(rewards: Sequence[float]) -> list[float]:
    """Rewards minus their mean. All are exactly zero when the rewards are equal up to rounding."""
    if not rewards:
        return []
    if max(rewards) - min(rewards) <= ROUNDING * max(1.0, *map(abs, rewards)):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def trained_members(group: Group) -> list[Trajectory]:
    """The group's trajectories, without those that only serve as context for branches."""
    return [member for member in group.trajectories if not member.is_context_only]


def trained_segments(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Segments of a trajectory, at least one: without tokens if the model was never asked, so that the attempt's
    reward counts. In a forked group only tokens after the branch have loss.
    """
    segments = trajectory.transcript.segments or (_NO_TOKENS,)
    if trajectory.branch is None:
        return segments
    return (cut_loss(trajectory, 0, segments[0]), *segments[1:])


def cut_loss(trajectory: Trajectory, number: int, segment: Segment) -> Segment:
    """The segment, without loss on the tokens before the trajectory's branch. `number`: its place in the trajectory."""
    if trajectory.branch is None or number or not len(segment.token_ids_T):
        return segment
    start = trajectory.transcript.opening_tokens(trajectory.branch.turns)
    mask_T = segment.loss_mask_T & (np.arange(len(segment.loss_mask_T)) >= start)
    return segment.model_copy(update={"loss_mask_T": mask_T})


@dataclass(frozen=True, slots=True)
class _Centred:
    """Centred reward of a trajectory, and what the objective divides it by."""

    reward: float
    divisor: float

    def advantage_of(self, segment_reward: float) -> float:
        return self.reward / self.divisor + segment_reward / self.divisor


def _center(
    rewards: Sequence[float], lengths: Sequence[int], objective: ObjectiveConfig
) -> list[_Centred]:
    """Each trajectory of a group. `lengths`: number of sampled tokens of each trajectory."""
    centred = center_rewards(rewards)
    divisors = [1.0] * len(rewards)
    if objective.divide_by_deviation and any(centred):
        divisors = [pstdev(rewards)] * len(rewards)
    if objective.divide_by_length:
        # an attempt without a sampled token has no loss, whatever its advantage
        counted = [max(1, length) for length in lengths]
        mean = math.fsum(counted) / len(counted)
        divisors = [
            divisor * length / mean for divisor, length in zip(divisors, counted, strict=True)
        ]
    return list(map(_Centred, centred, divisors))


def make_sample(
    group: Group,
    trajectory: Trajectory,
    number: int,
    segment: Segment,
    advantage: float,
    part: str = "",
) -> Sample:
    """The sample of a segment, by its number in the trajectory, or of one `part` of the segment."""
    return Sample(
        sample_id=f"{trajectory.trajectory_id}/{number}{part}",
        trajectory_id=trajectory.trajectory_id,
        group_id=group.group_id,
        segment=segment,
        advantage=advantage,
        reward=trajectory.reward.total,
        segment_reward=trajectory.reward.of_segment(number),
    )


def group_mean(members: Sequence[Trajectory]) -> list[float]:
    """Advantage of each attempt of a group: its reward minus the group's mean."""
    return center_rewards([member.reward.total for member in members])


def _advantages_by(name: str, members: Sequence[Trajectory]) -> list[_Centred]:
    """The numbers that a package gives the attempts of a group. GradingError unless each attempt has a finite one."""
    what = f"advantages {name!r}"
    given = list(ADVANTAGES.load(name)(members))
    if len(given) != len(members):
        raise GradingError(
            f"{what} of group {members[0].group_id} are {len(given)} numbers, wanted {len(members)}, one per attempt"
        )
    return [
        _Centred(bounded_number(f"{what} of attempt {member.trajectory_id}", value), 1.0)
        for member, value in zip(members, given, strict=True)
    ]


def make_samples(group: Group, objective: ObjectiveConfig) -> tuple[Sample, ...]:
    """One sample per segment of every trajectory of the group."""
    members = trained_members(group)
    segments = [trained_segments(member) for member in members]
    if objective.advantages == GROUP_MEAN:
        rewards = [member.reward.total for member in members]
        lengths = [sum(segment.sampled_tokens for segment in own) for own in segments]
        advantages = _center(rewards, lengths, objective)
    else:
        advantages = _advantages_by(objective.advantages, members)
    return tuple(
        make_sample(
            group, member, number, segment, centred.advantage_of(member.reward.of_segment(number))
        )
        for member, own, centred in zip(members, segments, advantages, strict=True)
        for number, segment in enumerate(own)
    )


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """Advantages after the penalty, parallel to the samples, and the mean k1 per trajectory."""

    advantages: list[float]
    mean_k1_nats: float


def penalize_divergence(
    samples: Sequence[Sample], k1_nats: Sequence[float], objective: ObjectiveConfig
) -> KlPenalty:
    """Subtracts kl_coefficient * k1 from each trajectory's reward, then centres and divides again within its group.

    `k1_nats` is parallel to `samples`: the sum over sampled tokens of log q(rollout) - log p(reference). A detached k1
    in the reward regularises the policy. As a loss its gradient would be zero on average.
    """
    by_trajectory: dict[str, float] = defaultdict(float)
    groups: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample, k1 in zip(samples, k1_nats, strict=True):
        by_trajectory[sample.trajectory_id] += k1
        groups[sample.group_id][sample.trajectory_id].append(sample)
    divides = objective.divide_by_deviation or objective.divide_by_length
    penalties: dict[str, float] = {}
    penalised: dict[str, _Centred] = {}
    for group in groups.values():
        k1s = [by_trajectory[trajectory_id] for trajectory_id in group]
        penalties |= dict(zip(group, center_rewards(k1s), strict=True))
        again = _center_again(list(group.values()), k1s, objective)
        penalised |= dict(zip(group, again, strict=True))
    return KlPenalty(
        advantages=[
            penalised[sample.trajectory_id].advantage_of(sample.segment_reward)
            if divides  # whole attempts; otherwise parts may have advantages of their own
            else sample.advantage - objective.kl_coefficient * penalties[sample.trajectory_id]
            for sample in samples
        ],
        mean_k1_nats=math.fsum(by_trajectory.values()) / max(1, len(by_trajectory)),
    )


def _center_again(
    group: Sequence[Sequence[Sample]], k1_nats: Sequence[float], objective: ObjectiveConfig
) -> list[_Centred]:
    """A group's trajectories with their penalised rewards. `group` holds the samples of each trajectory, at least one."""
    rewards = [
        own[0].reward - objective.kl_coefficient * k1
        for own, k1 in zip(group, k1_nats, strict=True)
    ]
    lengths = [sum(sample.segment.sampled_tokens for sample in own) for own in group]
    return _center(rewards, lengths, objective)

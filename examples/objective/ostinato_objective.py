"""Advantages by leave-one-out (RLOO, arXiv:2402.14740), and PPO's clipped surrogate (arXiv:1707.06347)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.tasks.records import Trajectory
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from ostinato.tasks.reinforcement.learning.objective import PolicyLoss

CLIP = 0.2


def leave_one_out(attempts: Sequence[Trajectory]) -> list[float]:
    """Each reward minus the mean of the other attempts' rewards."""
    rewards = [attempt.reward.total for attempt in attempts]
    others = max(1, len(rewards) - 1)
    return [reward - (sum(rewards) - reward) / others for reward in rewards]


def clipped_surrogate(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> PolicyLoss:
    """Minus the sum over N sampled tokens of min(ratio * A, clip(ratio) * A)."""
    ratio_N = (logprobs_N - rollout_logprobs_N).clamp(-20.0, 20.0).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantages_N
    return PolicyLoss(
        total=-torch.minimum(plain_N, clipped_N).sum() / config.loss_divisor_tokens,
        importance_weights_N=ratio_N.detach(),
        is_clipped_N=(clipped_N < plain_N).detach(),
    )

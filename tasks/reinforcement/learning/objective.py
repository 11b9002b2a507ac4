"""The policy-gradient loss of one microbatch.

The formula: minus the sum over sampled tokens of advantage * weight * log-probability, divided by a
constant.

Shapes: B rows, T tokens, N sampled tokens of the microbatch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any cap and still finite in fp32


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of a microbatch with the weight of each sampled token."""

    total: Tensor
    importance_weights_N: Tensor
    is_clipped_N: Tensor


def entropy_bonus(logprobs_N: Tensor, entropy_N: Tensor, coefficient: float) -> Tensor:
    """Addition to the advantages whose mean gradient is that of coefficient * entropy at each position.

    grad H = E[(-log p(a) - H) grad log p(a)] over actions a of the policy; H is a baseline here.
    """
    return coefficient * (-logprobs_N - entropy_N).detach()


def policy_loss(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> PolicyLoss:
    """Loss over sampled tokens. Importance weights and the clip band carry no gradient themselves."""
    log_ratio_N = (logprobs_N.detach() - rollout_logprobs_N).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    ratio_N = log_ratio_N.exp()
    weights_N = torch.ones_like(ratio_N)
    if config.importance_cap is not None:
        weights_N = ratio_N.clamp(max=config.importance_cap)
    is_clipped_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    if config.clip_band is not None:
        is_clipped_N = ((advantages_N > 0) & (ratio_N > config.clip_band.high_ratio)) | (
            (advantages_N < 0) & (ratio_N < config.clip_band.low_ratio)
        )
    kept_N = advantages_N * weights_N * ~is_clipped_N
    return PolicyLoss(
        total=-(kept_N * logprobs_N).sum() / config.loss_divisor_tokens,
        importance_weights_N=weights_N,
        is_clipped_N=is_clipped_N,
    )

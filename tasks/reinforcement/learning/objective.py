"""The loss of one microbatch: policy gradient, KL to the reference, and KL of the draft layers to the model.

The policy-gradient loss is minus the sum over sampled tokens of advantage * weight * log-probability, divided by a
constant. `step.py` adds the losses of the draft layers and of hints (`hints.py`).

Shapes: B rows, T tokens, N sampled tokens of the microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.infra.platform.errors import TrainingError
from ostinato.models.device import on_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.drafts import draft_divergence
from ostinato.models.training.objective import k3_nats
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.packing import Microbatch
from ostinato.tasks.reinforcement.learning.batches.scoring import score_batch
from ostinato.tasks.reinforcement.learning.config import LOSSES, LearningConfig, ObjectiveConfig
from ostinato.tasks.reinforcement.learning.report import TokenScores

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any cap and still finite in fp32


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of a microbatch with the weight of each sampled token."""

    total: Tensor  # a scalar, divided by loss_divisor_tokens
    importance_weights_N: Tensor  # 1: not weighted
    is_clipped_N: Tensor  # tokens without a gradient


def entropy_coefficient(samples: Sequence[Sample], objective: ObjectiveConfig) -> float:
    """Weight of the entropy bonus: 0 unless the mean surprise of the sampled tokens is below the entropy floor. The
    surprise estimates the entropy before any forward pass.
    """
    if objective.entropy_floor_nats is None:
        return 0.0
    logprobs = [sample.segment.logprobs_T[sample.segment.loss_mask_T] for sample in samples]
    surprise_N = -np.concatenate(logprobs)
    is_below = len(surprise_N) > 0 and float(surprise_N.mean()) < objective.entropy_floor_nats
    return objective.entropy_coefficient if is_below else 0.0


def entropy_bonus(logprobs_N: Tensor, entropy_N: Tensor, coefficient: float) -> Tensor:
    """Term for the advantages that adds, in expectation, the gradient of coefficient * entropy at each position.

    grad H = E[(-log p(a) - H) grad log p(a)] over actions a of the policy. Here H is the baseline.
    """
    return coefficient * (-logprobs_N - entropy_N).detach()


def policy_loss(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> PolicyLoss:
    """Loss over sampled tokens. Importance weights and the clip band carry no gradient."""
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


def named_loss(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> PolicyLoss:
    """The loss that the recipe names. TrainingError unless it has a total, and a weight and a mark per token. A total
    that is not finite is refused by all ranks together, through the norm of its gradient.
    """
    loss = LOSSES.load(config.loss)(logprobs_N, rollout_logprobs_N, advantages_N, config)
    if not isinstance(loss, PolicyLoss):
        raise TrainingError(f"loss {config.loss!r} gave {type(loss).__name__}, wanted a PolicyLoss")
    shapes = [
        tuple(tensor.shape) for tensor in (loss.total, loss.importance_weights_N, loss.is_clipped_N)
    ]
    wanted = [(), tuple(logprobs_N.shape), tuple(logprobs_N.shape)]
    if shapes != wanted:
        raise TrainingError(
            f"loss {config.loss!r} gave total, weights and marks of shapes {shapes}, wanted {wanted}"
        )
    return loss


def microbatch_loss(
    model: TrainerModel,
    batch: Microbatch,
    hidden_TBD: Tensor,
    config: LearningConfig,
    entropy_weight: float,
    reference_BT: Tensor | None,
) -> tuple[Tensor, Tensor, TokenScores]:
    """Loss of a microbatch, loss of the draft layers (0 if they do not learn), and scores of the sampled tokens.
    `reference_BT`: log-probabilities under the KL reference, for a KL term in the loss.
    """
    objective = config.objective
    mask_BT = on_device(batch.loss_mask_BT)
    logprobs_BT, entropy_BT = score_batch(model, batch, hidden_TBD)
    logprobs_N = logprobs_BT[mask_BT]
    rollout_logprobs_N = batch.rollout_logprobs_BT[batch.loss_mask_BT]
    advantages_BT = np.broadcast_to(batch.advantages_B[:, None], batch.tokens_BT.shape)
    advantages_N = on_device(advantages_BT[batch.loss_mask_BT])
    if entropy_weight:
        bonus_N = entropy_bonus(logprobs_N, entropy_BT[mask_BT], entropy_weight)
        advantages_N = advantages_N + bonus_N
    policy = named_loss(logprobs_N, on_device(rollout_logprobs_N), advantages_N, objective)
    total = policy.total
    if reference_BT is not None:
        kl_N = k3_nats(logprobs_N, reference_BT[mask_BT])
        total = total + objective.kl_coefficient * kl_N.sum() / objective.loss_divisor_tokens
    draft_kl_N = logprobs_N.new_zeros(0)
    if config.trains_drafts:
        tokens_BT = on_device(batch.tokens_BT)
        draft_kl_N = draft_divergence(model, hidden_TBD, tokens_BT, mask_BT)
    scores = TokenScores(
        trainer_logprobs_N=logprobs_N.detach().cpu().numpy(),
        rollout_logprobs_N=rollout_logprobs_N,
        weight_versions_N=batch.weight_versions_BT[batch.loss_mask_BT],
        is_kept_cache_N=batch.is_kept_cache_BT[batch.loss_mask_BT],
        entropy_N=entropy_BT.detach()[mask_BT].cpu().numpy(),
        draft_kl_N=draft_kl_N.detach().cpu().numpy(),
        importance_weights_N=policy.importance_weights_N.cpu().numpy(),
        is_clipped_N=policy.is_clipped_N.cpu().numpy(),
    )
    return total, draft_kl_N.sum() / objective.loss_divisor_tokens, scores

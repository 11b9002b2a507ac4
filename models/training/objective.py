"""Pure tensor losses and estimators.

The policy-gradient loss is in the learning stage, with its settings.

Shapes: N positions, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor


def k3_nats(sampled_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Per-token estimate of KL(sampled || other) in nats on sampled tokens: unbiased, never
    negative (Schulman 2020, joschu.net/blog/kl-approx.html).
    """
    log_ratio_N = other_logprobs_N - sampled_logprobs_N
    return torch.expm1(log_ratio_N) - log_ratio_N


class _DistillationKl(torch.autograd.Function):
    """Forward and backward of `distillation_kl`."""

    @staticmethod
    def forward(ctx: Any, draft_logits_NV: Tensor, teacher_logprobs_NV: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        draft_logprobs_NV = torch.log_softmax(draft_logits_NV, dim=-1)
        teacher_NV = teacher_logprobs_NV.exp()
        ctx.save_for_backward(draft_logprobs_NV, teacher_NV)
        return (teacher_NV * (teacher_logprobs_NV - draft_logprobs_NV)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def,override]
        draft_logprobs_NV, teacher_NV = ctx.saved_tensors
        return (draft_logprobs_NV.exp() - teacher_NV) * grad_N[:, None], None


def distillation_kl(draft_logits_NV: Tensor, teacher_logprobs_NV: Tensor) -> Tensor:
    """Returns KL(teacher || draft) of each position in nats. The teacher gets no gradient."""
    return _DistillationKl.apply(draft_logits_NV, teacher_logprobs_NV.detach())  # type: ignore[no-any-return]

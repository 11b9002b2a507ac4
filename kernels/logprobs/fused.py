"""Token log-probabilities and entropies without keeping logits.

The contracts `head_scores_op` and `head_gradient_op`, their CPU paths, and `fused_token_logprobs`
over them. There the logits are computed again in the backward pass; the eager CPU path keeps them
instead, a block at a time, because a CPU has the memory and not the arithmetic.

Shapes: N tokens, D model width, V vocabulary, C tokens of a block.
"""

from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operation import operation

BLOCK_TOKENS = 512


def _scores_shapes(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    scores = hidden_ND.new_empty(targets_N.shape, dtype=wide)
    return scores, torch.empty_like(scores), torch.empty_like(scores)


@operation("head_scores", _scores_shapes)
def head_scores_op(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies and normalizers (log of the sum of powers)."""
    logprobs_N, entropy_N, normalizer_N = _scores_shapes(hidden_ND, head_VD, targets_N)
    for start in range(0, targets_N.numel(), BLOCK_TOKENS):
        rows = slice(start, start + BLOCK_TOKENS)
        logits_CV = (hidden_ND[rows] @ head_VD.T).to(logprobs_N.dtype)
        normalizer_N[rows] = torch.logsumexp(logits_CV, dim=-1)
        target_C = logits_CV.gather(-1, targets_N[rows, None])[:, 0]
        logprobs_N[rows] = target_C - normalizer_N[rows]
        powers_CV = (logits_CV - normalizer_N[rows, None]).exp_()
        entropy_N[rows] = normalizer_N[rows] - torch.linalg.vecdot(powers_CV, logits_CV)
    return logprobs_N, entropy_N, normalizer_N


def _gradient_shapes(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, normalizer_N: Tensor, grad_N: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden_ND), torch.empty_like(head_VD)


@operation("head_gradient", _gradient_shapes)
def head_gradient_op(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, normalizer_N: Tensor, grad_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and output matrix for the gradient of the log-probabilities."""
    grad_hidden_ND, grad_head_VD = torch.empty_like(hidden_ND), torch.zeros_like(head_VD)
    for start in range(0, targets_N.numel(), BLOCK_TOKENS):
        rows = slice(start, start + BLOCK_TOKENS)
        logits_CV = (hidden_ND[rows] @ head_VD.T).to(normalizer_N.dtype)
        grads_CV = logits_CV.sub_(normalizer_N[rows, None]).exp_().mul_(-grad_N[rows, None])
        grads_CV.scatter_add_(-1, targets_N[rows, None], grad_N[rows, None])
        grads_CV = grads_CV.to(hidden_ND.dtype)
        torch.mm(grads_CV, head_VD, out=grad_hidden_ND[rows])
        grad_head_VD.addmm_(grads_CV.T, hidden_ND[rows])
    return grad_hidden_ND, grad_head_VD


class _FusedTokenLogprobs(torch.autograd.Function):
    """Forward and backward of `fused_token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, normalizer_N = head_scores_op(hidden_ND, head_VD, targets_N)
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, normalizer_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_ND, head_VD, targets_N, normalizer_N = ctx.saved_tensors
        return (*head_gradient_op(hidden_ND, head_VD, targets_N, normalizer_N, grad_N), None)


def fused_token_logprobs(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of `targets_N` (differentiable) and entropies, in nats."""
    return _FusedTokenLogprobs.apply(hidden_ND, head_VD, targets_N)  # type: ignore[no-any-return]

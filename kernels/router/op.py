"""Which experts a token goes to, with which weights.

It replays no routes: models/routing.py does.

Either score gives weights that are chosen scores over their sum, so the gradient touches the chosen
logits only.

Shapes: N tokens, E experts, K experts a token.
"""

from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operation import operation
from ostinato.kernels.router.reference import Score, router_topk_reference, score_experts


def _router_shapes(
    logits_NE: Tensor, bias_E: Tensor, top_k: int, score: str, num_groups: int, groups_kept: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits_NE.shape
    return (
        logits_NE.new_empty((tokens, top_k), dtype=torch.float32),
        logits_NE.new_empty((tokens, top_k), dtype=torch.int64),
        logits_NE.new_empty(experts, dtype=torch.int32),
        logits_NE.new_empty(experts, dtype=torch.float32),
    )


@operation("router_topk", _router_shapes)
def router_topk_op(
    logits_NE: Tensor, bias_E: Tensor, top_k: int, score: str, num_groups: int, groups_kept: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `router_topk`."""
    if num_groups > 1:
        return router_topk_reference(logits_NE, bias_E, top_k, score, num_groups, groups_kept)  # type: ignore[arg-type]
    scores_NE = score_experts(logits_NE.float(), score)  # type: ignore[arg-type]
    experts_NK = torch.topk(scores_NE + bias_E, top_k, dim=-1).indices
    chosen_NK = scores_NE.gather(-1, experts_NK)
    counts_E = torch.bincount(experts_NK.flatten(), minlength=logits_NE.shape[1])
    weights_NK = chosen_NK / chosen_NK.sum(-1, keepdim=True)
    return weights_NK, experts_NK, counts_E.to(torch.int32), scores_NE.sum(0)


class _RouterTopk(torch.autograd.Function):
    """Forward and backward of `router_topk`."""

    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, bias_E: Tensor, top_k: int, score: str, groups: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights_NK, experts_NK, counts_E, sums_E = router_topk_op(
            logits_NE, bias_E, top_k, score, *groups
        )
        ctx.save_for_backward(logits_NE, weights_NK, experts_NK)
        ctx.score = score
        ctx.mark_non_differentiable(experts_NK, counts_E, sums_E)
        return weights_NK, experts_NK, counts_E, sums_E

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_NE, weights_NK, experts_NK = ctx.saved_tensors
        along_N1 = (grad_NK * weights_NK).sum(-1, keepdim=True)
        grad_chosen_NK = weights_NK * (grad_NK - along_N1)
        if ctx.score == "sigmoid":
            # d log sigmoid(x) = 1 - sigmoid(x); of a softmax over the chosen it is 1
            grad_chosen_NK = grad_chosen_NK * torch.sigmoid(-logits_NE.gather(-1, experts_NK))
        grad_NE = torch.zeros_like(logits_NE)
        grad_NE.scatter_(-1, experts_NK, grad_chosen_NK.to(grad_NE.dtype))
        return grad_NE, None, None, None, None


def router_topk(
    logits_NE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    score: Score = "sigmoid",
    num_groups: int = 1,
    groups_kept: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns weights_NK (sum 1), experts_NK, counts_E and score_sums_E, as the reference does; of
    equally good experts any may be chosen.
    """
    return _RouterTopk.apply(logits_NE, bias_E, top_k, score, (num_groups, groups_kept))  # type: ignore[no-any-return]

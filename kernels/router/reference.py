"""The router's choice in plain torch, to check `op.py` against.

Shapes: N tokens, E experts, K experts a token, G groups of experts.
"""

from typing import Literal

import torch
from torch import Tensor

Score = Literal["sigmoid", "softmax"]


def score_experts(logits_NE: Tensor, score: Score) -> Tensor:
    """Scores between 0 and 1."""
    return torch.sigmoid(logits_NE) if score == "sigmoid" else torch.softmax(logits_NE, dim=-1)


def best_first(values: Tensor, count: int) -> Tensor:
    """Indices of the largest along the last dimension; of equals the first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def router_topk_reference(
    logits_NE: Tensor,
    bias_E: Tensor,
    top_k: int,
    score: Score = "sigmoid",
    num_groups: int = 1,
    groups_kept: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns weights_NK (sum 1), experts_NK, counts_E and score_sums_E (for load balancing).

    Experts are chosen by score plus bias and weighted by score. With groups, only experts of the
    `groups_kept` groups whose two best sum highest can be chosen.
    """
    scores_NE = score_experts(logits_NE.float(), score)
    biased_NE = scores_NE.detach() + bias_E
    if num_groups > 1:
        grouped_NGM = biased_NE.unflatten(-1, (num_groups, -1))
        totals_NG = grouped_NGM.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept_NG = torch.zeros_like(totals_NG, dtype=torch.bool).scatter_(
            -1, best_first(totals_NG, groups_kept), True
        )
        biased_NE = grouped_NGM.masked_fill(~kept_NG[..., None], float("-inf")).flatten(-2)
    experts_NK = best_first(biased_NE, top_k)
    chosen_NK = scores_NE.gather(-1, experts_NK)
    counts_E = torch.bincount(experts_NK.flatten(), minlength=logits_NE.shape[1])
    return (
        chosen_NK / chosen_NK.sum(-1, keepdim=True),
        experts_NK,
        counts_E.to(torch.int32),
        scores_NE.detach().sum(0),
    )

"""The expert router: Megatron's top-k router with compact routes and replay.

It does not run experts.

Replay makes trainer and engine use the same experts although their scores differ by rounding or by
a few weight versions. A replayed expert whose score is under `plausibility_ratio` times the
router's own weakest choice is no longer one this router could have meant: the router's own
candidates take its place. Megatron's `RouterReplay` has neither this filter nor a "no route" mark,
and keeps its routers in a global list, so it is not used.

Shapes: T tokens, B batch, N = T*B, E experts, K experts per token.
"""

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

LIVE_ROUTE = -1
# Lifts accepted experts above every live score, which is at most 1 plus a balancing bias.
ACCEPTED_LIFT = 1024.0


def choose_experts(
    scores_NE: Tensor,
    bias_E: Tensor,
    top_k: int,
    replay_NK: Tensor | None = None,
    plausibility_ratio: float = 0.0,
) -> Tensor:
    """Returns the experts of each token: its own best by score plus bias, or the plausible ones of
    `replay_NK`.

    Positions of `replay_NK` holding LIVE_ROUTE are filled with the router's own candidates.
    """
    biased_NE = scores_NE + bias_E
    own_NK = torch.topk(biased_NE, top_k, dim=-1).indices
    if replay_NK is None:
        return own_NK
    is_given_NK = replay_NK != LIVE_ROUTE
    given_NK = replay_NK.clamp(min=0)
    floor_N1 = plausibility_ratio * scores_NE.gather(-1, own_NK).amin(-1, keepdim=True)
    is_accepted_NK = is_given_NK & (scores_NE.gather(-1, given_NK) >= floor_N1)
    lift_NE = torch.zeros_like(biased_NE).scatter_reduce_(
        -1, given_NK, is_accepted_NK.to(biased_NE.dtype) * ACCEPTED_LIFT, reduce="amax"
    )
    return torch.topk(biased_NE + lift_NE, top_k, dim=-1).indices


class ReplayRouter(TopKRouter):
    """Sigmoid router: experts by score plus balancing bias, weights normalised to sum 1."""

    expert_bias: Tensor
    local_tokens_per_expert: Tensor
    replay_NK: Tensor | None = None
    plausibility_ratio: float = 0.0
    num_replayed: int = 0
    num_replaced: int = 0

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (weights_NK, experts_NK) instead of Megatron's dense [N, E] pair. Counts unpadded
        tokens in training.
        """
        scores_NE = torch.sigmoid(logits.view(-1, logits.shape[-1]))
        with torch.no_grad():
            experts_NK = choose_experts(
                scores_NE, self.expert_bias, self.topk, self.replay_NK, self.plausibility_ratio
            )
            if self.replay_NK is not None:
                self.count_replaced(experts_NK, self.replay_NK)
            if self.training:
                self.count_tokens(experts_NK, padding_mask)
        chosen_NK = scores_NE.gather(-1, experts_NK)
        return chosen_NK / chosen_NK.sum(-1, keepdim=True), experts_NK

    def count_tokens(self, experts_NK: Tensor, padding_mask: Tensor | None) -> None:
        """Adds this batch to the tokens each expert has seen since the last balancing."""
        if padding_mask is not None:
            experts_NK = experts_NK[~padding_mask.reshape(-1)]
        counts_E = torch.bincount(
            experts_NK.reshape(-1), minlength=self.config.num_moe_experts or 0
        )
        self.local_tokens_per_expert += counts_E

    def count_replaced(self, experts_NK: Tensor, replay_NK: Tensor) -> None:
        """Adds this batch to the replayed routes and to those the filter replaced."""
        is_given_NK = replay_NK != LIVE_ROUTE
        is_used_NK = (replay_NK[:, :, None] == experts_NK[:, None, :]).any(-1)
        self.num_replayed += int(is_given_NK.sum())
        self.num_replaced += int((is_given_NK & ~is_used_NK).sum())

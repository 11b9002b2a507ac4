"""The expert router: Megatron's top-k router with compact routes and replay.

Replay makes trainer and engine use the same experts although their scores differ by rounding or by
a few weight versions. A replayed expert is implausible if its score is under `plausibility_ratio`
times the router's own weakest choice; the router's own candidates then replace it. Megatron's
`RouterReplay` has neither this filter nor a "no route" mark, and keeps its routers in a global
list, so it is not used.

Shapes: T tokens, B batch, N = T*B, L layers with experts, E experts, K experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.parallel.context import local_rows
from ostinato.models.spec import ModelSpec

LIVE_ROUTE = -1
# Lifts accepted experts above every live score, which is at most 1 plus a balancing bias.
ACCEPTED_LIFT = 1024.0


def choose_experts(
    scores_NE: Tensor,
    bias_E: Tensor,
    top_k: int,
    replay_NK: Tensor | None = None,
    plausibility_ratio: float = 0.0,
    groups: tuple[int, int] = (1, 1),
) -> Tensor:
    """Returns the experts of each token: the best by score plus bias, or the plausible experts of
    `replay_NK`.

    Positions of `replay_NK` with LIVE_ROUTE get the router's own candidates. `groups`: number of
    expert groups, and number of groups from which a token may choose.
    """
    biased_NE = scores_NE + bias_E
    limited_NE = _limit_groups(biased_NE, *groups)
    own_NK = torch.topk(limited_NE, top_k, dim=-1).indices
    if replay_NK is None:
        return own_NK
    is_given_NK = replay_NK != LIVE_ROUTE
    given_NK = replay_NK.clamp(min=0)
    floor_N1 = plausibility_ratio * scores_NE.gather(-1, own_NK).amin(-1, keepdim=True)
    is_accepted_NK = is_given_NK & (scores_NE.gather(-1, given_NK) >= floor_N1)
    lift_NE = torch.zeros_like(biased_NE).scatter_reduce_(
        -1, given_NK, is_accepted_NK.to(biased_NE.dtype) * ACCEPTED_LIFT, reduce="amax"
    )
    lifted_NE = torch.where(lift_NE > 0, biased_NE + lift_NE, limited_NE)
    return torch.topk(lifted_NE, top_k, dim=-1).indices


def _limit_groups(biased_NE: Tensor, groups: int, chosen: int) -> Tensor:
    """Sets scores outside each token's best groups to -inf. A group's score is the sum of its two best."""
    if chosen == groups:
        return biased_NE
    grouped_NGE = biased_NE.view(len(biased_NE), groups, -1)
    group_scores_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[-1]), dim=-1).values.sum(-1)
    best_NG = group_scores_NG.topk(chosen, dim=-1).indices
    is_out_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter_(-1, best_NG, False)
    return grouped_NGE.masked_fill(is_out_NG[..., None], float("-inf")).flatten(1)


class ReplayRouter(TopKRouter):
    """Router that chooses by score plus balancing bias, with shares normalised and scaled by the spec."""

    spec: ModelSpec

    expert_bias: Tensor
    local_tokens_per_expert: Tensor
    replay_NK: Tensor | None = None
    plausibility_ratio: float = 0.0
    num_replayed: int = 0
    num_replaced: int = 0
    chosen: list[Tensor] | None = None  # if set, the experts of each batch are appended
    repeated_NK: Tensor | None = None  # if set, these experts are used and not counted

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights_NK, experts_NK) instead of Megatron's dense [N, E] pair. In training it also
        counts the tokens that are not padding.
        """
        logits_NE = logits.view(-1, logits.shape[-1])
        is_softmax = self.spec.router_score == "softmax"
        scores_NE = torch.softmax(logits_NE, -1) if is_softmax else torch.sigmoid(logits_NE)
        repeated_NK = self.repeated_NK
        experts_NK = self._choose(scores_NE, padding_mask) if repeated_NK is None else repeated_NK
        if self.chosen is not None:
            self.chosen.append(experts_NK)
        chosen_NK = scores_NE.gather(-1, experts_NK)
        if self.spec.router_normalizes:
            chosen_NK = chosen_NK / chosen_NK.sum(-1, keepdim=True)
        return chosen_NK * self.spec.router_scale, experts_NK

    @torch.no_grad()
    def _choose(self, scores_NE: Tensor, padding_mask: Tensor | None) -> Tensor:
        experts_NK = choose_experts(
            scores_NE,
            self.expert_bias,
            self.topk,
            self.replay_NK,
            self.plausibility_ratio,
            (self.spec.router_groups, self.spec.router_groups_per_token),
        )
        if self.replay_NK is not None:
            self.count_replaced(experts_NK, self.replay_NK)
        if self.training:
            self.count_tokens(experts_NK, padding_mask)
        return experts_NK

    def count_tokens(self, experts_NK: Tensor, padding_mask: Tensor | None) -> None:
        """Adds this batch to the tokens each expert has seen since the last balancing."""
        if padding_mask is not None:
            experts_NK = experts_NK[~padding_mask.reshape(-1)]
        counts_E = torch.bincount(
            experts_NK.reshape(-1), minlength=self.config.num_moe_experts or 0
        )
        self.local_tokens_per_expert += counts_E

    def count_replaced(self, experts_NK: Tensor, replay_NK: Tensor) -> None:
        """Adds this batch to the counts of replayed routes and of routes that the filter replaced."""
        is_given_NK = replay_NK != LIVE_ROUTE
        is_used_NK = (replay_NK[:, :, None] == experts_NK[:, None, :]).any(-1)
        self.num_replayed += int(is_given_NK.sum())
        self.num_replaced += int((is_given_NK & ~is_used_NK).sum())


@contextmanager
def replaying(chunk: Any, routes_BTLK: Tensor | None, plausibility_ratio: float) -> Iterator[None]:
    """Makes the routers of a chunk of layers use the plausible experts of `routes_BTLK`, which
    holds routes of whole rows and of all layers.
    """
    layers = [
        layer
        for layer in chunk.decoder.layers
        if isinstance(getattr(layer.mlp, "router", None), ReplayRouter)
    ]
    for layer in layers:
        layer.mlp.router.plausibility_ratio = plausibility_ratio
        layer.mlp.router.replay_NK = _routes_of(layer, routes_BTLK)
    try:
        yield
    finally:
        for layer in layers:
            layer.mlp.router.plausibility_ratio = 0.0
            layer.mlp.router.replay_NK = None


def _routes_of(layer: Any, routes_BTLK: Tensor | None) -> Tensor | None:
    """A layer's routes of this rank's tokens, in the layer's time-first order."""
    if routes_BTLK is None:
        return None
    router: ReplayRouter = layer.mlp.router
    shape, wanted = tuple(routes_BTLK.shape[2:]), (router.spec.num_moe_layers, router.topk)
    if shape != wanted:
        raise ValueError(f"routes have [layers, experts] {shape}, wanted {wanted}")
    index = layer.layer_number - 1 - router.spec.num_dense_layers  # Megatron counts from 1
    routes_TBK = local_rows(routes_BTLK[:, :, index], 1).transpose(0, 1)
    if router.config.sequence_parallel:  # a rank routes its own part of each row
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        routes_TBK = routes_TBK.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return routes_TBK.flatten(0, 1).long()


class RankRouters:
    """Routers of one rank's layers, in the order of the layers."""

    def __init__(self, routers: Sequence[ReplayRouter]) -> None:
        self._routers = routers

    def counts_LE(self) -> Tensor:
        """Returns how many tokens each expert took since the last `balance`."""
        counts = [router.local_tokens_per_expert for router in self._routers]
        return torch.stack(counts) if counts else torch.zeros(0, 0, device=current_device())

    def balance(self, counts_LE: Tensor, rate: float) -> None:
        """Moves experts' biases by `rate` towards the mean load and resets the counts."""
        for router, counts_E in zip(self._routers, counts_LE, strict=True):
            if router.spec.router_score == "sigmoid" and router.weight.requires_grad:
                router.expert_bias += rate * torch.sign(counts_E.mean() - counts_E)
            router.local_tokens_per_expert.zero_()

    def take_replay_counts(self) -> tuple[int, int]:
        """(replayed routes, routes replaced by the plausibility filter) since the last call."""
        replayed = sum(router.num_replayed for router in self._routers)
        replaced = sum(router.num_replaced for router in self._routers)
        for router in self._routers:
            router.num_replayed = router.num_replaced = 0
        return replayed, replaced

"""The mixture-of-experts layer, plugged in where Megatron builds the MLP of a layer.

If one rank holds all experts of a layer, tokens stay on their rank. Under expert or expert-tensor
parallelism a dispatcher of Megatron sends tokens to their experts, in the order of the experts, and
the sums back. The device determines the dispatcher.

The configuration names the experts' precision. In fp32 one fused operation sorts, multiplies and
sums. In other precisions the tokens are laid out and rounded, and the grouped kernels multiply.
Weights are always fp32.

Shapes: T tokens, B batch, N = T*B, E experts, D model width, F inner width of an expert, G = 2F.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.moe.grouped_mlp import grouped_mlp
from ostinato.kernels.moe.op import expert_mlp
from ostinato.kernels.moe.precision import PrecisionName, find_precision
from ostinato.models.device import current_device, token_dispatcher
from ostinato.models.network.mixed import plain_context
from ostinato.models.network.parallel.shards import find_cuts, local_shard, mark_experts
from ostinato.models.network.routing import ReplayRouter
from ostinato.models.network.transformer_engine import EngineRecipe, trunk_modules
from ostinato.models.spec import ModelSpec

DISPATCHERS: dict[str, type[MoEAllGatherTokenDispatcher] | type[MoEAlltoAllTokenDispatcher]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
}


@dataclass
class TrunkConfig(TransformerConfig):
    """Megatron's configuration with our shape and precisions."""

    spec: ModelSpec = None  # type: ignore[assignment]  # Megatron's fields have defaults
    precision: PrecisionName = "fp32"
    engine: EngineRecipe | None = None


def _fresh_experts(
    shape: tuple[int, int, int],
    draw: Callable[[Tensor], object] | None,
    *,
    inner_dimension: int,
    strides: int,
) -> torch.nn.Parameter:
    """This rank's shard of freshly drawn experts. All are drawn, so that equal seeds give equal
    experts in every layout.
    """
    whole = torch.nn.Parameter(torch.empty(shape))
    mark_experts(whole, inner_dimension, strides)
    draw(whole)  # type: ignore[misc]  # Megatron fills it in
    part = torch.nn.Parameter(local_shard(whole.detach(), find_cuts(whole)).clone())
    mark_experts(part, inner_dimension, strides)
    return part


class ExpertMlp(torch.nn.Module):
    """Stacked SwiGLU matrices of this rank's experts, gate rows before up rows. If experts are
    sharded along their inner width, the output is one term of a sum over ranks.
    """

    def __init__(self, config: TransformerConfig, precision: PrecisionName = "fp32") -> None:
        super().__init__()
        self.precision: PrecisionName = precision
        num_experts, hidden = config.num_moe_experts or 0, config.hidden_size
        inner = config.moe_ffn_hidden_size or 0
        self.gate_up_EGD = _fresh_experts(
            (num_experts, 2 * inner, hidden), config.init_method, inner_dimension=1, strides=2
        )
        self.down_EDF = _fresh_experts(
            (num_experts, hidden, inner),
            config.output_layer_init_method,
            inner_dimension=2,
            strides=1,
        )

    def forward(self, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """output_ND: the results of each token's experts, summed by weight."""
        if self.precision != "fp32":
            return grouped_mlp(
                tokens_ND,
                experts_NK,
                weights_NK,
                self.gate_up_EGD,
                self.down_EDF,
                precision=find_precision(self.precision, tokens_ND.device),
            )
        return expert_mlp(tokens_ND, experts_NK, weights_NK, self.gate_up_EGD, self.down_EDF)


class SortedMoELayer(BaseMoELayer):
    """MoE layer that sorts tokens by expert, computes expert by expert and adds the shared one."""

    def __init__(
        self,
        config: TrunkConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,  # Megatron 0.19 also passes a name and whether it is an MTP layer
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, layer_number, groups)
        self.router: ReplayRouter = ReplayRouter(config=config, pg_collection=groups)
        self.router.spec = config.spec
        self.experts = ExpertMlp(config, config.precision)
        if groups.tp_ep.size() > 1:
            self.token_dispatcher = DISPATCHERS[token_dispatcher(current_device())](
                self.num_local_experts, self.local_expert_indices, config, pg_collection=groups
            )
        shared = config.spec.shared_expert_hidden_size
        if shared:
            narrow = copy.copy(config)
            narrow.ffn_hidden_size = shared  # MLP reads both this and its argument
            self.shared_experts = MLP(
                narrow, trunk_modules(config.engine).mlp, ffn_hidden_size=shared
            )

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Output, and None as bias. `padding_mask` is batch first, with True for padding."""
        mask_TB = None if padding_mask is None else padding_mask.transpose(0, 1)
        with plain_context():
            hidden = hidden_states.to(self.router.weight.dtype)
            weights_NK, experts_NK = self.router(hidden, mask_TB)
            tokens_ND = hidden.reshape(-1, hidden.shape[-1])
            if self.token_dispatcher is None:
                output_ND = self.experts(tokens_ND, experts_NK, weights_NK)
            else:
                output_ND = self._run_spread(
                    self.token_dispatcher, tokens_ND, experts_NK, weights_NK
                )
        output = output_ND.view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)[0]
        return output, None

    def _run_spread(
        self,
        dispatcher: MoETokenDispatcher,
        tokens_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
    ) -> Tensor:
        """Output of tokens whose experts, or shards of them, are on several ranks."""
        num_tokens = len(tokens_ND)
        shape = (num_tokens, self.router.weight.shape[0])
        is_chosen_NE = experts_NK.new_zeros(shape, dtype=torch.bool).scatter(1, experts_NK, True)
        shares_NE = weights_NK.new_zeros(shape).scatter(1, experts_NK, weights_NK)
        # the all-gather needs equal row counts on all ranks
        if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
            more_rows = (0, 0, 0, _missing_rows(tokens_ND, dispatcher.tp_ep_group))
            tokens_ND, is_chosen_NE, shares_NE = (
                functional.pad(one, more_rows) for one in (tokens_ND, is_chosen_NE, shares_NE)
            )
        tokens_ND, shares_NE = dispatcher.dispatch_preprocess(tokens_ND, is_chosen_NE, shares_NE)
        tokens_ND, shares_NE = dispatcher.token_dispatch(tokens_ND, shares_NE)
        sorted_PD, counts_E, shares_P = dispatcher.dispatch_postprocess(tokens_ND, shares_NE)
        expert_P = torch.arange(len(counts_E), device=sorted_PD.device).repeat_interleave(
            counts_E.to(sorted_PD.device), output_size=len(sorted_PD)
        )
        output_PD = self.experts(sorted_PD, expert_P[:, None], shares_P[:, None])
        combined = dispatcher.token_combine(dispatcher.combine_preprocess(output_PD))
        return dispatcher.combine_postprocess(combined)[:num_tokens]


def _missing_rows(tokens_ND: Tensor, group: dist.ProcessGroup) -> int:
    """Rows by which this rank is short of the fullest: microbatches of transcripts differ in size."""
    most = torch.tensor(len(tokens_ND), device=tokens_ND.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most) - len(tokens_ND)

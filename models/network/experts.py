"""The mixture-of-experts layer, plugged in where Megatron builds the MLP of a layer.

One process holds all experts of its layers: Megatron's token dispatcher, which moves tokens between
processes and pads or permutes dense maps, is left out of the path.

The configuration names the experts' precision. In fp32 one fused operation sorts, multiplies and sums;
in any other the tokens are laid out, rounded, and the grouped kernels multiply. The
weights stay fp32 in every precision.

Shapes: T tokens, B batch, N = T*B, E experts, D model width, F inner width of an expert, G = 2F.
"""

import copy
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ostinato.kernels.moe.grouped_mlp import grouped_mlp
from ostinato.kernels.moe.op import expert_mlp
from ostinato.kernels.moe.precision import PrecisionName, find_precision
from ostinato.models.network.routing import ReplayRouter
from ostinato.models.spec import ModelSpec

DENSE_MLP = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


@dataclass
class TrunkConfig(TransformerConfig):
    """Megatron's configuration, and the shape that it came from."""

    spec: ModelSpec = None  # type: ignore[assignment]  # Megatron's fields have defaults
    precision: PrecisionName = "fp32"


class ExpertMlp(torch.nn.Module):
    """All experts' SwiGLU matrices, stacked. Gate rows before up rows."""

    def __init__(self, config: TransformerConfig, precision: PrecisionName = "fp32") -> None:
        super().__init__()
        self.precision: PrecisionName = precision
        num_experts, hidden = config.num_moe_experts or 0, config.hidden_size
        inner = config.moe_ffn_hidden_size or 0
        self.gate_up_EGD = torch.nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_EDF = torch.nn.Parameter(torch.empty(num_experts, hidden, inner))
        config.init_method(self.gate_up_EGD)  # type: ignore[misc]
        config.output_layer_init_method(self.down_EDF)  # type: ignore[misc]

    def forward(self, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Output, and None as bias. `padding_mask` is batch first; True is padding."""
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
    """Routes, sorts tokens by expert, runs one product an expert; adds the shared expert."""

    def __init__(
        self,
        config: TrunkConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, layer_number, groups)
        self.router: ReplayRouter = ReplayRouter(config=config, pg_collection=groups)
        self.router.spec = config.spec
        self.experts = ExpertMlp(config, config.precision)
        shared = config.spec.shared_expert_hidden_size
        if shared:
            narrow = copy.copy(config)
            narrow.ffn_hidden_size = shared  # MLP reads it beside its argument
            self.shared_experts = MLP(narrow, DENSE_MLP, ffn_hidden_size=shared)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Output, and None as bias. `padding_mask` is batch first; True is padding."""
        mask_TB = None if padding_mask is None else padding_mask.transpose(0, 1)
        weights_NK, experts_NK = self.router(hidden_states, mask_TB)
        tokens_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = self.experts(tokens_ND, experts_NK, weights_NK).view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)[0]
        return output, None

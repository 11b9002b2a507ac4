"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), plugged in as
Megatron's self-attention.

Each rank holds the whole down projections, which are small; up projections are sharded by heads. It
replaces Megatron's own module, which builds its RoPE on a CUDA device, and uses Megatron's linear
layers. Ranks that share a row gather its latents, which are smaller than keys and values.

Shapes: T tokens, B batch, N query heads, H width of a query or key head, V of a value head, R
rotated columns of H, C = H-R.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.attention.core import BlockCoreAttention
from ostinato.models.network.attention.prefixes import PrefixTree
from ostinato.models.network.experts import TrunkConfig
from ostinato.models.network.mixed import ColumnLinear
from ostinato.models.network.norm import RootMeanSquareNorm
from ostinato.models.network.parallel.context import (
    context_ranks,
    gather_parts,
    local_rows,
    restore_order,
)
from ostinato.models.network.rope import plain_frequencies, yarn_frequencies, yarn_scales

LATENT_NORM_EPSILON = 1e-6  # in every published model, whatever its other norms use


class LatentSelfAttention(MegatronModule):
    """Attention with low-rank queries, keys and values. A head's last columns are rotated."""

    def __init__(self, config: TrunkConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config)
        spec, latent = config.spec, config.spec.latent
        assert latent is not None
        self.latent = latent
        self.frequencies = self._frequencies(spec.rope_base)
        self.widths = (spec.head_dim - latent.rotary_head_dim, latent.rotary_head_dim)
        self.key_value_rank, self.value_width = latent.key_value_rank, latent.value_head_dim
        self.q_down = self.q_norm = None
        if latent.query_rank:
            self.q_down = self._whole(spec.hidden_size, latent.query_rank)
            self.q_norm = RootMeanSquareNorm(latent.query_rank, LATENT_NORM_EPSILON, config)
        self.q_up = self._cut(latent.query_rank or spec.hidden_size, spec.query_size)
        self.kv_down = self._whole(spec.hidden_size, sum((self.key_value_rank, self.widths[1])))
        self.kv_norm = RootMeanSquareNorm(self.key_value_rank, LATENT_NORM_EPSILON, config)
        up_rows = spec.num_attention_heads * (self.widths[0] + self.value_width)
        self.kv_up = self._cut(self.key_value_rank, up_rows)
        self.core_attention = BlockCoreAttention(config, layer_number, has_whole_keys=True)
        self.linear_proj = RowParallelLinear(
            spec.mixed_size,
            spec.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,  # type: ignore[arg-type]  # filled in
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def _whole(self, columns: int, rows: int) -> torch.nn.Linear:
        """A matrix that every rank holds. Under sequence parallelism it is applied to its own tokens."""
        linear = torch.nn.Linear(columns, rows, bias=False)
        self.config.init_method(linear.weight)  # type: ignore[misc]  # Megatron fills it in
        linear.weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[assignment]
        return linear

    def _cut(self, columns: int, rows: int) -> ColumnLinear:
        """A matrix whose rows are sharded over the tensor-parallel ranks by whole heads."""
        return ColumnLinear(
            columns,
            rows,
            config=self.config,
            init_method=self.config.init_method,  # type: ignore[arg-type]
            bias=False,
            gather_output=False,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: PrefixTree | None, **_: Any
    ) -> tuple[Tensor, None]:
        """Output, time first, and None as bias."""
        latent, key_rotated_TBR = self.kv_down(hidden_states).split(
            (self.key_value_rank, self.widths[1]), -1
        )
        if self.config.sequence_parallel:
            key_rotated_TBR = gather_from_sequence_parallel_region(key_rotated_TBR)
        latent = self.kv_norm(latent)
        if context_ranks() > 1:
            latent = gather_parts(latent)
            key_rotated_TBR = restore_order(gather_parts(key_rotated_TBR))
        key_value = self.kv_up(latent)[0]
        if context_ranks() > 1:
            key_value = restore_order(key_value, self.config.tensor_model_parallel_size)
        key_value = _heads(key_value, self.widths[0] + self.value_width)
        key_plain_TBNC, value_TBNV = key_value.split((self.widths[0], self.value_width), -1)
        if self.q_down is not None and self.q_norm is not None:
            hidden_states = self.q_norm(self.q_down(hidden_states))
        query_TBNH = _heads(self.q_up(hidden_states)[0], sum(self.widths))
        query_plain_TBNC, query_rotated_TBNR = query_TBNH.split(self.widths, -1)
        positions_T = torch.arange(len(key_rotated_TBR), device=key_rotated_TBR.device)
        if attention_mask is not None:
            positions_T = attention_mask.positions_N
        cos_TR, sin_TR, score_scale = self._angles(positions_T)
        query_rotated_TBNR = _rotate(query_rotated_TBNR, local_rows(cos_TR), local_rows(sin_TR))
        key_rotated_TBNR = _rotate(key_rotated_TBR[:, :, None], cos_TR, sin_TR)
        key_rotated_TBNR = key_rotated_TBNR.expand(-1, -1, key_plain_TBNC.shape[2], -1)
        mixed = self.core_attention(
            torch.cat((query_plain_TBNC, query_rotated_TBNR), -1) * score_scale,
            torch.cat((key_plain_TBNC, key_rotated_TBNR), -1),
            value_TBNV,
            attention_mask,
        )
        return self.linear_proj(mixed)[0], None

    def _frequencies(self, base: float) -> Tensor:
        """Rotation of each pair of rotated columns per token, in radians."""
        width, yarn = self.latent.rotary_head_dim, self.latent.yarn
        if yarn is None:
            return plain_frequencies(width, base).to(current_device())
        return yarn_frequencies(width, base, yarn).to(current_device())

    def _angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor, float]:
        """Cosines and sines of half the rotated columns, and the factor of the scores."""
        yarn = self.latent.yarn
        rotated_scale, score_scale = (1.0, 1.0) if yarn is None else yarn_scales(yarn)
        angles = positions_T.outer(self.frequencies)
        return angles.cos() * rotated_scale, angles.sin() * rotated_scale, score_scale


def _heads(rows_TBO: Tensor, width: int) -> Tensor:
    return rows_TBO.view(*rows_TBO.shape[:2], -1, width)


def _rotate(columns_TBNR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotates pairs of columns 2i and 2i+1. Results are stored in halves: scores do not depend on it."""
    first, second = columns_TBNR[..., 0::2], columns_TBNR[..., 1::2]
    cos, sin = (part[:, None, None].to(columns_TBNR.dtype) for part in (cos_TR, sin_TR))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

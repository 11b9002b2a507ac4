"""Causal attention by torch's fused kernel, plugged in as Megatron's core attention.

Owns `FusedCoreAttention`. Enters: query, key and value heads of a layer, time first. Leaves: the heads' outputs side by side.
It holds no parameters; projections, norms and RoPE are Megatron's. Padding at the end of a row needs no mask: causal attention
never looks ahead.

Shapes: T tokens, B batch, N query heads, M key/value heads, H head width.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional


class FusedCoreAttention(torch.nn.Module):
    """Grouped-query causal attention; Megatron's own keeps the full score matrix."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.scale = (config.kv_channels or 1) ** -0.5

    def forward(
        self, query_TBNH: Tensor, key_TBMH: Tensor, value_TBMH: Tensor, attention_mask: None, /, **_: Any
    ) -> Tensor:
        """Attends each token to itself and all before it in its row."""
        if attention_mask is not None:
            raise ValueError("attention_mask is set, wanted None: rows are causal and padded at the end only")
        num_tokens, batch, num_heads, head_dim = query_TBNH.shape
        repeats = num_heads // key_TBMH.shape[2]
        query_BNTH = query_TBNH.permute(1, 2, 0, 3)
        # Explicit copies: the grouped form of the fused CPU kernel falls back to a slow path.
        key_BNTH = key_TBMH.permute(1, 2, 0, 3).repeat_interleave(repeats, dim=1)
        value_BNTH = value_TBMH.permute(1, 2, 0, 3).repeat_interleave(repeats, dim=1)
        output_BNTH = functional.scaled_dot_product_attention(
            query_BNTH, key_BNTH, value_BNTH, is_causal=True, scale=self.scale
        )
        return output_BNTH.permute(2, 0, 1, 3).reshape(num_tokens, batch, num_heads * head_dim)

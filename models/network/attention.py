"""Causal attention, plugged in as Megatron's core attention.

It holds no parameters; projections, norms and RoPE are Megatron's. Padding at the end of a row
needs no mask: causal attention never looks ahead.

Shapes: T tokens, B batch, N query heads, M key/value heads, H width of a query or key head, V of a
value head, R = N/M, C = B*M.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ostinato.kernels.attention.op import causal_attention


class BlockCoreAttention(torch.nn.Module):
    """Grouped-query causal attention without the full score matrix or copied keys."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query_TBNH: Tensor,
        key_TBMH: Tensor,
        value_TBMV: Tensor,
        attention_mask: None,
        /,
        **_: Any,
    ) -> Tensor:
        """Attends each token to itself and all before it in its row."""
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is set, wanted None: rows are causal and padded at the end only"
            )
        num_tokens, batch, num_heads, head_dim = query_TBNH.shape
        groups = key_TBMH.shape[2]
        query_CRTH = query_TBNH.permute(1, 2, 0, 3).reshape(
            batch * groups, -1, num_tokens, head_dim
        )
        key_CTH = key_TBMH.permute(1, 2, 0, 3).reshape(-1, num_tokens, head_dim)
        value_CTV = value_TBMV.permute(1, 2, 0, 3).reshape(-1, num_tokens, value_TBMV.shape[-1])
        output_CRTV = causal_attention(query_CRTH, key_CTH, value_CTV)
        output_BNTV = output_CRTV.view(batch, num_heads, num_tokens, -1)
        return output_BNTV.permute(2, 0, 1, 3).reshape(num_tokens, batch, -1)

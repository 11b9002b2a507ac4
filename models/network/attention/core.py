"""Causal attention, plugged in as Megatron's core attention.

It holds no parameters; projections, norms and RoPE are Megatron's. Padding at the end of a row
needs no mask: causal attention never looks ahead.

Shapes: T tokens (of this rank, if ranks share a row), S tokens of the keys, B batch, N query heads,
M key/value heads, H width of a query or key head, V of a value head, R = N/M, C = B*M.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ostinato.kernels.attention.op import causal_attention
from ostinato.models.network.attention.prefixes import PrefixTree
from ostinato.models.network.mixed import to_product_dtype
from ostinato.models.network.parallel.context import (
    context_ranks,
    gather_parts,
    local_chunks,
    restore_order,
)


class BlockCoreAttention(torch.nn.Module):
    """Grouped-query causal attention without the full score matrix or copied keys. If ranks share a
    row, it gathers keys and values unless `has_whole_keys`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        has_whole_keys: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.has_whole_keys = has_whole_keys

    def forward(
        self,
        query_TBNH: Tensor,
        key_TBMH: Tensor,
        value_TBMV: Tensor,
        attention_mask: PrefixTree | None,
        /,
        **_: Any,
    ) -> Tensor:
        """Attends each token to itself and to all tokens before it in its row or prefix tree."""
        # norms leave queries and keys in fp32 while values may be bf16
        query_TBNH, key_TBMH, value_TBMV = (
            to_product_dtype(part) for part in (query_TBNH, key_TBMH, value_TBMV)
        )
        if attention_mask is not None:
            return _attend_tree(query_TBNH, key_TBMH, value_TBMV, attention_mask)
        if context_ranks() == 1:
            return _attend(query_TBNH, key_TBMH, value_TBMV)
        key_SBMH, value_SBMV = key_TBMH, value_TBMV
        if not self.has_whole_keys:
            both = restore_order(gather_parts(torch.cat((key_TBMH, value_TBMV), -1)))
            key_SBMH, value_SBMV = both.split((key_TBMH.shape[-1], value_TBMV.shape[-1]), -1)
        size = len(query_TBNH) // 2
        mixed = []
        for chunk, query in zip(local_chunks(), query_TBNH.split(size), strict=True):
            end = (chunk + 1) * size
            mixed.append(_attend(query, key_SBMH[:end], value_SBMV[:end]))
        return torch.cat(mixed)


def _attend_tree(
    query_T1NH: Tensor, key_T1MH: Tensor, value_T1MV: Tensor, tree: PrefixTree
) -> Tensor:
    """Attention over a prefix tree, whose nodes are the T tokens. Each call takes rows of similar
    length. Queries, keys and values are gathered once for all calls, since the backward of each
    gather fills a whole gradient.
    """
    sizes = [(call.num_keys, call.num_queries, call.num_rows) for call in tree.calls]
    keys, values = (
        part.squeeze(1).index_select(0, tree.keys_SJ).split([s * j for s, _, j in sizes])
        for part in (key_T1MH, value_T1MV)
    )
    queries = query_T1NH.squeeze(1).index_select(0, tree.queries_QJ)
    mixed = [
        _attend(
            query.unflatten(0, (q, j)), key.unflatten(0, (s, j)), value.unflatten(0, (s, j))
        ).flatten(0, 1)
        for (s, q, j), query, key, value in zip(
            sizes, queries.split([q * j for _, q, j in sizes]), keys, values, strict=True
        )
    ]
    return torch.cat(mixed).index_select(0, tree.outputs_N).unsqueeze(1)


def _attend(query_TBNH: Tensor, key_SBMH: Tensor, value_SBMV: Tensor) -> Tensor:
    """Causal attention. Queries belong to the last T of S tokens."""
    num_queries, batch, num_heads, head_dim = query_TBNH.shape
    num_tokens, _, groups, _ = key_SBMH.shape
    query_CRTH = query_TBNH.permute(1, 2, 0, 3).reshape(batch * groups, -1, num_queries, head_dim)
    key_CSH = key_SBMH.permute(1, 2, 0, 3).reshape(-1, num_tokens, head_dim)
    value_CSV = value_SBMV.permute(1, 2, 0, 3).reshape(-1, num_tokens, value_SBMV.shape[-1])
    output_CRTV = causal_attention(query_CRTH, key_CSH, value_CSV)
    output_BNTV = output_CRTV.reshape(batch, num_heads, num_queries, -1)
    return output_BNTV.permute(2, 0, 1, 3).reshape(num_queries, batch, -1)

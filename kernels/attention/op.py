"""Causal grouped-query attention for training on a CPU.

It masks no padding.

At nano (head width 32, 256 tokens) torch's fused kernel takes 36 ms for forward and backward of one
layer, most of it in many tiny products, and this one 16 ms. Queries that share a key head form one
matrix, and a block of queries reads only the keys up to its end. Probabilities are kept for the
backward, so memory grows with the square of the row's length. Long rows, narrow dtypes and all rows
on CUDA use torch's kernel, which keeps none.

Shapes: C batch x key/value heads, R query heads per key/value head, T tokens, H width of a query or
key head, V of a value head, Q queries of a block, S keys so far.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

QUERY_BLOCK_TOKENS = 128
HEADS_PER_PASS = 16
LONGEST_KEPT_TOKENS = 1024  # 4 MB of probabilities per head


class _CausalAttention(torch.autograd.Function):
    """Forward and backward of `causal_attention`. Queries come already scaled."""

    @staticmethod
    def forward(ctx: Any, query_CRTH: Tensor, key_CTH: Tensor, value_CTV: Tensor) -> Tensor:
        heads, repeats, num_queries, width = query_CRTH.shape
        output_CRTV = query_CRTH.new_empty(heads, repeats, num_queries, value_CTV.shape[-1])
        block = min(QUERY_BLOCK_TOKENS, num_queries)
        earlier = key_CTH.shape[1] - num_queries
        future_QQ = query_CRTH.new_full((block, block), float("-inf")).triu_(1)
        probabilities = []
        for chosen, start, stop in _blocks(heads, num_queries):
            size, end = stop - start, stop + earlier
            query = query_CRTH[chosen, :, start:stop].reshape(-1, repeats * size, width)
            scores = torch.bmm(query, key_CTH[chosen, :end].transpose(1, 2)).view(
                -1, repeats, size, end
            )
            scores[..., end - size :].add_(future_QQ[:size, :size])
            weights = torch.softmax(scores, dim=-1)
            mixed = torch.bmm(weights.view(-1, repeats * size, end), value_CTV[chosen, :end])
            output_CRTV[chosen, :, start:stop] = mixed.view(
                -1, repeats, size, output_CRTV.shape[-1]
            )
            probabilities.append(weights)
        ctx.save_for_backward(query_CRTH, key_CTH, value_CTV)
        ctx.probabilities = probabilities if any(ctx.needs_input_grad) else None
        return output_CRTV

    @staticmethod
    def backward(ctx: Any, grad_CRTV: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        query_CRTH, key_CTH, value_CTV = ctx.saved_tensors
        heads, repeats, num_queries, width = query_CRTH.shape
        earlier = key_CTH.shape[1] - num_queries
        grad_query_CRTH = torch.empty_like(query_CRTH)
        grad_key_CTH, grad_value_CTV = torch.zeros_like(key_CTH), torch.zeros_like(value_CTV)
        for weights, (chosen, start, stop) in zip(
            ctx.probabilities, _blocks(heads, num_queries), strict=True
        ):
            size, end = stop - start, stop + earlier
            rows = (-1, repeats * size, end)
            query = query_CRTH[chosen, :, start:stop].reshape(-1, repeats * size, width)
            grad = grad_CRTV[chosen, :, start:stop].flatten(1, 2)
            grad_value_CTV[chosen, :end] += torch.bmm(weights.view(rows).transpose(1, 2), grad)
            grad_weights = torch.bmm(grad, value_CTV[chosen, :end].transpose(1, 2)).view(
                weights.shape
            )
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_weights, weights, -1, weights.dtype
            ).view(rows)
            grad_query = torch.bmm(grad_scores, key_CTH[chosen, :end])
            grad_query_CRTH[chosen, :, start:stop] = grad_query.view(-1, repeats, size, width)
            grad_key_CTH[chosen, :end] += torch.bmm(grad_scores.transpose(1, 2), query)
        return grad_query_CRTH, grad_key_CTH, grad_value_CTV


def _blocks(heads: int, num_queries: int) -> list[tuple[slice, int, int]]:
    """Blocks (heads, first query, query after the last). The scores of a block fit the cache."""
    return [
        (slice(first, first + HEADS_PER_PASS), start, min(start + QUERY_BLOCK_TOKENS, num_queries))
        for first in range(0, heads, HEADS_PER_PASS)
        for start in range(0, num_queries, QUERY_BLOCK_TOKENS)
    ]


def causal_attention(query_CRTH: Tensor, key_CTH: Tensor, value_CTV: Tensor) -> Tensor:
    """Attends each token to itself and all tokens before it. Scores are scaled by H**-0.5. If there
    are fewer queries than keys, they belong to the last tokens.
    """
    num_queries, num_tokens = query_CRTH.shape[2], key_CTH.shape[1]
    is_narrow = query_CRTH.dtype.itemsize < 4  # our backward sums in the operands' dtype
    if query_CRTH.is_cuda or is_narrow or num_tokens > LONGEST_KEPT_TOKENS:
        # torch's kernel without the score matrix needs equal widths
        missing = query_CRTH.shape[-1] - value_CTV.shape[-1]
        shape = (-1, query_CRTH.shape[1], -1, -1)
        keys_CRTH, values_CRTH = (
            part[:, None].expand(shape) for part in (key_CTH, pad(value_CTV, (0, missing)))
        )
        is_square = num_queries == num_tokens
        seen_QT = query_CRTH.new_ones(num_queries, num_tokens, dtype=torch.bool)
        mixed_CRTH = scaled_dot_product_attention(
            query_CRTH,
            keys_CRTH,
            values_CRTH,
            attn_mask=None if is_square else seen_QT.tril_(num_tokens - num_queries),
            is_causal=is_square,
        )
        return mixed_CRTH[..., : value_CTV.shape[-1]]
    scaled_CRTH = query_CRTH * query_CRTH.shape[-1] ** -0.5
    return _CausalAttention.apply(scaled_CRTH, key_CTH, value_CTV)  # type: ignore[no-any-return]

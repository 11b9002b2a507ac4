"""The plain formula of causal grouped-query attention, to check `op.py` against.

Shapes: C batch x key/value heads, R query heads per key/value head, T tokens, H width of a query or
key head, V of a value head.
"""

import torch
from torch import Tensor


def causal_attention_reference(query_CRTH: Tensor, key_CTH: Tensor, value_CTV: Tensor) -> Tensor:
    """Sums the values of each token and of those before it, weighted by softmax of scaled scores."""
    scores = torch.einsum("crth,csh->crts", query_CRTH, key_CTH) * query_CRTH.shape[-1] ** -0.5
    num_queries, num_tokens = scores.shape[-2:]
    future = torch.ones(num_queries, num_tokens, dtype=torch.bool).triu(
        1 + num_tokens - num_queries
    )
    return torch.einsum(
        "crts,csv->crtv", scores.masked_fill(future, float("-inf")).softmax(-1), value_CTV
    )

"""Shared prefixes of rows, computed once: the attempts of a group share their prompt and often
their first turns.

Rows form a prefix tree. A node is a token together with all tokens before it. All operations except
attention work on nodes. Attention gathers keys and values of the nodes into rows again, so that any
kernel for causal rows can be used, and computes each node's query once (after Prefix Grouper, arXiv
2506.05433, which shares one prefix). Each position of a row takes the result of its node, which
sums the gradients of all rows.

Shapes: B rows, T tokens of a row, N nodes, L MoE layers, K experts per token, D model width, S keys
and Q queries of a row, J rows that attend in one call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.models.network.routing import LIVE_ROUTE

# Rows are padded to multiples of this, so that rows of similar length attend in one call.
ATTENTION_QUANTUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Rows of S keys each, with queries and outputs for the last Q positions."""

    num_keys: int
    num_queries: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows of a batch as nodes. Filler nodes fill N up to the wanted number; nothing reads them."""

    nodes_TB: Tensor  # node of each position; arbitrary at padding
    places_N: Tensor  # b*T + t of the first row with the node; 0 for fillers
    positions_N: Tensor
    is_filler_N: Tensor
    keys_SJ: Tensor  # nodes whose keys each attention call reads, one call after the other, flat
    queries_QJ: Tensor  # nodes of its queries, likewise
    outputs_N: Tensor  # index of each node in the concatenated outputs of the calls
    calls: tuple[AttentionCall, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes, fillers included."""
        return len(self.places_N)

    def to(self, device: torch.device) -> "PrefixTree":
        """The tree on a device."""
        tensors = (field.name for field in fields(self) if field.name != "calls")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    def pick(
        self, tokens_BT: Tensor, routes_BTLK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, padding mask and routes of the nodes, as one row of N."""
        tokens_N = tokens_BT.flatten()[self.places_N]
        if routes_BTLK is not None:
            routes_NLK = routes_BTLK.flatten(0, 1)[self.places_N]
            routes_BTLK = routes_NLK.masked_fill(self.is_filler_N[:, None, None], LIVE_ROUTE)[None]
        return tokens_N[None], self.is_filler_N[None], routes_BTLK

    def spread(self, hidden_N1D: Tensor) -> Tensor:
        """hidden_TBD of all positions, from the hidden states of the nodes."""
        hidden_ND = hidden_N1D[:, 0].index_select(0, self.nodes_TB.flatten())
        return hidden_ND.view(*self.nodes_TB.shape, -1)


def find_prefixes(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """(order, shared): indices of the rows in sorted order, and per row the number of leading items
    that it shares with the row before it. No earlier row shares more. Items are along the first
    axis and have one shape and dtype.
    """
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [0] * min(1, len(rows))
    for before, after in pairwise(order):
        most = min(len(rows[before]), len(rows[after]))
        differs = rows[before][:most] != rows[after][:most]
        differs = differs.any(axis=tuple(range(1, differs.ndim)))
        shared.append(int(differs.argmax()) if differs.any() else most)
    return order, shared


def number_nodes(lengths: Sequence[int], shared: Sequence[int], num_tokens: int) -> np.ndarray:
    """nodes_BT of sorted rows, numbered row by row. The prefix that a row shares with the row
    before takes that row's nodes.
    """
    nodes_BT = np.zeros((len(lengths), num_tokens), dtype=np.int64)
    used = 0
    for row, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if common:
            nodes_BT[row, :common] = nodes_BT[row - 1, :common]
        nodes_BT[row, common:length] = np.arange(used, used + length - common)
        used += length - common
    return nodes_BT


def build_tree(nodes_BT: np.ndarray, padding_BT: np.ndarray, num_nodes: int) -> PrefixTree:
    """The tree of rows with these nodes, filled up to `num_nodes`. Padding is at the end of a row,
    and rows share prefixes only.
    """
    num_rows, num_tokens = nodes_BT.shape
    is_real_BT = ~padding_BT
    places_P = np.flatnonzero(is_real_BT)
    places_N = np.full(num_nodes, -1, dtype=np.int64)
    places_N[nodes_BT.flatten()[places_P][::-1]] = places_P[::-1]  # the first row wins
    is_filler_N = places_N < 0
    places_N[is_filler_N] = 0
    is_own_BT = is_real_BT & (places_N[nodes_BT] // num_tokens == np.arange(num_rows)[:, None])
    lengths_B, shared_B = is_real_BT.sum(1), is_own_BT.argmax(1)
    rows_by_call: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(is_own_BT.any(1)):
        keys = min(_fill_up(int(lengths_B[row])), num_tokens)
        queries = min(_fill_up(keys - int(shared_B[row])), keys)
        rows_by_call.setdefault((keys, queries), []).append(int(row))
    if not rows_by_call:  # only padding; still one call, since ranks wait for each other per layer
        rows_by_call[num_tokens, num_tokens] = [0]
    outputs_N = np.zeros(num_nodes, dtype=np.int64)
    calls, key_parts, query_parts, done = [], [], [], 0
    for (keys, queries), rows in rows_by_call.items():
        query_nodes_QJ = nodes_BT[rows, keys - queries : keys].T
        is_own_QJ = is_own_BT[rows, keys - queries : keys].T
        outputs_N[query_nodes_QJ[is_own_QJ]] = done + np.flatnonzero(is_own_QJ)
        key_parts.append(nodes_BT[rows, :keys].T.flatten())
        query_parts.append(query_nodes_QJ.flatten())
        calls.append(AttentionCall(keys, queries, len(rows)))
        done += query_nodes_QJ.size
    return PrefixTree(
        nodes_TB=torch.from_numpy(np.ascontiguousarray(nodes_BT.T)),
        places_N=torch.from_numpy(places_N),
        positions_N=torch.from_numpy(places_N % num_tokens),
        is_filler_N=torch.from_numpy(is_filler_N),
        keys_SJ=torch.from_numpy(np.concatenate(key_parts)),
        queries_QJ=torch.from_numpy(np.concatenate(query_parts)),
        outputs_N=torch.from_numpy(outputs_N),
        calls=tuple(calls),
    )


def _fill_up(tokens: int) -> int:
    return -(-tokens // ATTENTION_QUANTUM_TOKENS) * ATTENTION_QUANTUM_TOKENS


@contextmanager
def rotating_nodes(chunk: Any, tree: PrefixTree | None) -> Iterator[None]:
    """Makes RoPE of a chunk of layers use each node's position in its row. Latent attention reads
    the tree itself.
    """
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is None or tree is None:
        yield
        return
    rotary.positions_T = tree.positions_N
    try:
        yield
    finally:
        rotary.positions_T = None

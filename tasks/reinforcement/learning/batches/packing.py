"""Packing of samples of any length into microbatches of few fixed shapes.

Samples with a common prefix of equal tokens and routes are packed into one microbatch, and the trainer computes the
prefix once (models/network/attention/prefixes.py).

Shapes: B rows, T tokens of the bucket, L MoE layers, K experts per token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.infra.agent.transcript import MISSING_ROUTE, Segment
from ostinato.infra.platform.errors import TrainingError
from ostinato.models.network.attention.prefixes import (
    PrefixTree,
    build_tree,
    find_prefixes,
    number_nodes,
)
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import PackingConfig

# Tokens of context at which a token's attention costs as much as the rest of its work (nano: head_dim * heads = 128).
ATTENTION_PARITY_TOKENS = 2048
# The nodes of a tree are padded to a multiple of this: few shapes, which tensor parallelism can divide.
NODE_QUANTUM = 64
# Most places in all rows per token that a microbatch computes: the hidden states of every place stay in memory.
MAX_PLACES_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows of equal length. Padding is at the end of a row. It carries no loss and no replayed routes."""

    sample_indices_B: np.ndarray  # int64, index of each row's sample
    tokens_BT: np.ndarray  # int64
    loss_mask_BT: np.ndarray  # bool, true on tokens the model sampled
    padding_BT: np.ndarray  # bool, true after the end of the sample
    rollout_logprobs_BT: np.ndarray  # float32, 0 where not sampled
    weight_versions_BT: np.ndarray  # int64, -1 where not sampled
    is_kept_cache_BT: np.ndarray  # bool, true where older weights computed keys in the cache
    advantages_B: np.ndarray  # float32
    temperatures_B: np.ndarray  # float32, at which the row's tokens were sampled
    routes_BTLK: np.ndarray  # int16, MISSING_ROUTE where the trainer's router chooses
    # int64, equal in the common prefixes of rows; None: nothing is shared
    nodes_BT: np.ndarray | None = None
    num_nodes: int = 0

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((~self.padding_BT).sum())

    @property
    def distinct_tokens(self) -> int:
        """Tokens that are computed, without padding."""
        if self.nodes_BT is None:
            return self.real_tokens
        return int(self.nodes_BT[~self.padding_BT].max(initial=-1)) + 1

    @property
    def places(self) -> int:
        """Tokens that are computed, padding included."""
        return self.tokens_BT.size if self.nodes_BT is None else self.num_nodes

    @property
    def cost(self) -> float:
        """Relative work: a term linear in tokens, and a quadratic one for attention."""
        return self.places * (1 + self.tokens_BT.shape[1] / ATTENTION_PARITY_TOKENS)

    def tree(self) -> PrefixTree | None:
        """Tree of the rows' common prefixes. None: nothing is shared."""
        if self.nodes_BT is None:
            return None
        return build_tree(self.nodes_BT, self.padding_BT, self.num_nodes)


def pack(
    samples: Sequence[Sample], advantages: Sequence[float], config: PackingConfig
) -> list[Microbatch]:
    """Microbatches with as many rows as the token budget allows, the most expensive first."""
    lengths = [trainable_length(sample.segment) for sample in samples]
    for sample, length in zip(samples, lengths, strict=True):
        if length and sample.segment.loss_mask_T[0]:
            raise TrainingError(
                f"sample {sample.sample_id} begins with a sampled token, wanted a prompt"
            )
        if sample.segment.sampling.is_truncated:
            raise TrainingError(
                f"sample {sample.sample_id} was drawn at {sample.segment.sampling}, wanted the whole "
                "vocabulary: temperature above 0, top_p 1, top_k 0"
            )
    if config.shares_prefixes:
        microbatches = [
            _stack_tree(samples, advantages, lengths, rows, config)
            for rows in _cut_tree(samples, lengths, config)
        ]
    else:
        microbatches = [
            _stack(samples, advantages, lengths, rows, config)
            for rows in _cut_rows(lengths, config)
        ]
    return sorted(microbatches, key=lambda batch: -batch.cost)


def _cut_rows(lengths: Sequence[int], config: PackingConfig) -> list[list[int]]:
    """Sample indices of each microbatch. Longest samples first, so that its rows have similar lengths."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    cuts: list[list[int]] = []
    start = 0
    while start < len(order):
        bucket = row_tokens(lengths[order[start]], config.bucket_tokens)
        cuts.append(order[start : start + max(1, config.microbatch_tokens // bucket)])
        start += len(cuts[-1])
    return cuts


def _cut_tree(
    samples: Sequence[Sample], lengths: Sequence[int], config: PackingConfig
) -> list[dict[int, int]]:
    """Sample index and number of tokens shared with the sample before, for the samples of each microbatch. Samples are
    ordered by their tokens and routes. A microbatch ends when its unshared tokens reach the budget.
    """
    items = [
        _items(sample.segment, length) for sample, length in zip(samples, lengths, strict=True)
    ]
    cuts: list[dict[int, int]] = []
    nodes = longest = 0
    for index, shared in zip(*find_prefixes(items), strict=True):
        longest = max(longest, lengths[index])
        nodes += lengths[index] - shared
        places = (1 + len(cuts[-1])) * row_tokens(longest, config.bucket_tokens) if cuts else 0
        is_full = nodes > config.microbatch_tokens
        if not cuts or is_full or places > MAX_PLACES_PER_TOKEN * config.microbatch_tokens:
            cuts.append({})
            nodes, longest, shared = lengths[index], lengths[index], 0
        cuts[-1][index] = shared
    return cuts


def _items(segment: Segment, length: int) -> np.ndarray:
    """Token and routes of each place. Together with those before it they determine its hidden state."""
    routes_TLK = segment.routed_experts_TLK[:length]
    routes = routes_TLK.reshape(length, math.prod(routes_TLK.shape[1:]))
    return np.column_stack((segment.token_ids_T[:length], routes)).astype(np.int32)


def row_tokens(length: int, buckets: Sequence[int]) -> int:
    """The shortest bucket that holds a sample, or a multiple of the longest bucket if none does."""
    longest = buckets[-1]
    if length > longest:
        return -(-length // longest) * longest
    return next(size for size in buckets if size >= length)


def assign_to_ranks(microbatches: Sequence[Microbatch], num_ranks: int) -> list[list[int]]:
    """Indices of each rank's microbatches. Each goes, in order, to the rank with the least work so far."""
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for index, batch in enumerate(microbatches):
        rank = work.index(min(work))
        assigned[rank].append(index)
        work[rank] += batch.cost
    return assigned


def pad_to_equal_shapes(microbatches: Sequence[Microbatch], num_ranks: int) -> list[Microbatch]:
    """The microbatches, padded so that each `num_ranks` consecutive ones have one shape. Empty ones fill the last
    round. Ranks that share experts exchange tokens in each layer, so they need microbatches of equal number and shape.
    """
    padded: list[Microbatch] = []
    for start in range(0, len(microbatches), num_ranks):
        batches = list(microbatches[start : start + num_ranks])
        batches += [_empty(batches[0])] * (num_ranks - len(batches))
        rows, tokens = (max(batch.tokens_BT.shape[axis] for batch in batches) for axis in (0, 1))
        num_nodes = max(batch.num_nodes for batch in batches)
        padded += [replace(_widen(batch, rows, tokens), num_nodes=num_nodes) for batch in batches]
    return padded


def _empty(like: Microbatch) -> Microbatch:
    return replace(
        like,
        sample_indices_B=like.sample_indices_B[:0],
        loss_mask_BT=np.zeros_like(like.loss_mask_BT),
        padding_BT=np.ones_like(like.padding_BT),
        routes_BTLK=np.full_like(like.routes_BTLK, MISSING_ROUTE),
    )


def _widen(batch: Microbatch, rows: int, tokens: int) -> Microbatch:
    """The batch, padded to this number of rows and of tokens per row."""
    missing = (rows - batch.tokens_BT.shape[0], tokens - batch.tokens_BT.shape[1])
    if missing == (0, 0):
        return batch

    def pad(array: np.ndarray, value: float | bool) -> np.ndarray:
        widths = [
            (0, missing[axis] if axis < min(2, array.ndim) else 0) for axis in range(array.ndim)
        ]
        return np.pad(array, widths, constant_values=value)

    return Microbatch(
        sample_indices_B=batch.sample_indices_B,
        tokens_BT=pad(batch.tokens_BT, 0),
        loss_mask_BT=pad(batch.loss_mask_BT, False),
        padding_BT=pad(batch.padding_BT, True),
        rollout_logprobs_BT=pad(batch.rollout_logprobs_BT, 0.0),
        weight_versions_BT=pad(batch.weight_versions_BT, -1),
        is_kept_cache_BT=pad(batch.is_kept_cache_BT, False),
        advantages_B=pad(batch.advantages_B, 0.0),
        temperatures_B=pad(batch.temperatures_B, 1.0),
        routes_BTLK=pad(batch.routes_BTLK, MISSING_ROUTE),
        nodes_BT=None if batch.nodes_BT is None else pad(batch.nodes_BT, 0),
    )


def trainable_length(segment: Segment) -> int:
    """Tokens up to the last sampled one. Tool results after it, as in an attempt cut short, affect no loss."""
    sampled = np.flatnonzero(segment.loss_mask_T)
    return int(sampled[-1]) + 1 if len(sampled) else len(segment.token_ids_T)


def _stack_tree(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    lengths: Sequence[int],
    shared: Mapping[int, int],
    config: PackingConfig,
) -> Microbatch:
    batch = _stack(samples, advantages, lengths, list(shared), config)
    bucket = batch.tokens_BT.shape[1]
    nodes_BT = number_nodes([lengths[index] for index in shared], list(shared.values()), bucket)
    num_nodes = -(-(int(nodes_BT.max()) + 1) // NODE_QUANTUM) * NODE_QUANTUM
    return replace(batch, nodes_BT=nodes_BT, num_nodes=num_nodes)


def _stack(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    lengths: Sequence[int],
    indices: Sequence[int],
    config: PackingConfig,
) -> Microbatch:
    rows, segments = len(indices), [samples[index].segment for index in indices]
    bucket = row_tokens(max(lengths[index] for index in indices), config.bucket_tokens)
    routes_shape = segments[0].routed_experts_TLK.shape[1:]
    batch = Microbatch(
        sample_indices_B=np.asarray(indices, dtype=np.int64),
        tokens_BT=np.zeros((rows, bucket), dtype=np.int64),
        loss_mask_BT=np.zeros((rows, bucket), dtype=bool),
        padding_BT=np.ones((rows, bucket), dtype=bool),
        rollout_logprobs_BT=np.zeros((rows, bucket), dtype=np.float32),
        weight_versions_BT=np.full((rows, bucket), -1, dtype=np.int64),
        is_kept_cache_BT=np.zeros((rows, bucket), dtype=bool),
        advantages_B=np.array([advantages[index] for index in indices], dtype=np.float32),
        temperatures_B=np.array([s.sampling.temperature for s in segments], dtype=np.float32),
        routes_BTLK=np.full((rows, bucket, *routes_shape), MISSING_ROUTE, dtype=np.int16),
    )
    for row, (segment, index) in enumerate(zip(segments, indices, strict=True)):
        length = lengths[index]
        batch.tokens_BT[row, :length] = segment.token_ids_T[:length]
        batch.loss_mask_BT[row, :length] = segment.loss_mask_T[:length]
        batch.padding_BT[row, :length] = False
        batch.rollout_logprobs_BT[row, :length] = segment.logprobs_T[:length]
        batch.weight_versions_BT[row, :length] = segment.weight_versions_T[:length]
        is_kept_T = segment.cache_versions_T[:length] < segment.weight_versions_T[:length]
        batch.is_kept_cache_BT[row, :length] = is_kept_T
        batch.routes_BTLK[row, :length] = segment.routed_experts_TLK[:length]
    return batch

"""From samples of any length to microbatches of few fixed shapes.

Shapes: B rows, T tokens of the bucket, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.infra.agent.transcript import MISSING_ROUTE, Segment
from ostinato.infra.platform.errors import TrainingError
from ostinato.tasks.learning.config import PackingConfig
from ostinato.tasks.records import Sample

# Tokens of context at which a token's attention costs as much as the rest of its work (nano: head_dim * heads = 128).
ATTENTION_PARITY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows of equal length. Padding is at the end of a row, unmasked, and routes live."""

    sample_indices_B: np.ndarray  # int64, which sample each row is
    tokens_BT: np.ndarray  # int64
    loss_mask_BT: np.ndarray  # bool, true on tokens the model sampled
    padding_BT: np.ndarray  # bool, true after the end of the sample
    rollout_logprobs_BT: np.ndarray  # float32, 0 where not sampled
    weight_versions_BT: np.ndarray  # int64, -1 where not sampled
    is_kept_cache_BT: np.ndarray  # bool, sampled from keys that older weights made
    advantages_B: np.ndarray  # float32
    temperatures_B: np.ndarray  # float32, that the row's tokens were drawn at
    routes_BTLK: np.ndarray  # int16, MISSING_ROUTE where the trainer routes live

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((~self.padding_BT).sum())


def pack(
    samples: Sequence[Sample], advantages: Sequence[float], config: PackingConfig
) -> list[Microbatch]:
    """Longest samples first, so that rows of a microbatch are alike and memory peaks at once.

    A microbatch takes the bucket of its longest row and as many rows as fit its token budget.
    """
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
    order = sorted(range(len(samples)), key=lambda index: (-lengths[index], index))
    microbatches: list[Microbatch] = []
    start = 0
    while start < len(order):
        bucket = row_tokens(lengths[order[start]], config.bucket_tokens)
        rows = order[start : start + max(1, config.microbatch_tokens // bucket)]
        microbatches.append(
            _stack(
                [samples[row].segment for row in rows],
                [advantages[row] for row in rows],
                rows,
                bucket,
            )
        )
        start += len(rows)
    return sorted(microbatches, key=lambda batch: -cost(batch.tokens_BT.shape))


def row_tokens(length: int, buckets: Sequence[int]) -> int:
    """The shortest bucket that holds a sample. Above them all, a multiple of the longest."""
    longest = buckets[-1]
    if length > longest:
        return -(-length // longest) * longest
    return next(size for size in buckets if size >= length)


def deal(microbatches: Sequence[Microbatch], num_ranks: int) -> list[list[int]]:
    """The indices of each rank's microbatches: in their order, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for index, batch in enumerate(microbatches):
        rank = work.index(min(work))
        shares[rank].append(index)
        work[rank] += cost(batch.tokens_BT.shape)
    return shares


def even_out(microbatches: Sequence[Microbatch], num_ranks: int) -> list[Microbatch]:
    """The microbatches, padded so that those of `num_ranks` in turn have one shape, and empty ones at the end to
    make their number even: ranks that share experts meet in each layer of each microbatch.
    """
    evened: list[Microbatch] = []
    for start in range(0, len(microbatches), num_ranks):
        turn = list(microbatches[start : start + num_ranks])
        turn += [_empty(turn[0])] * (num_ranks - len(turn))
        rows, tokens = (max(batch.tokens_BT.shape[axis] for batch in turn) for axis in (0, 1))
        evened += [_widen(batch, rows, tokens) for batch in turn]
    return evened


def _empty(like: Microbatch) -> Microbatch:
    return replace(
        like,
        sample_indices_B=like.sample_indices_B[:0],
        loss_mask_BT=np.zeros_like(like.loss_mask_BT),
        padding_BT=np.ones_like(like.padding_BT),
        routes_BTLK=np.full_like(like.routes_BTLK, MISSING_ROUTE),
    )


def _widen(batch: Microbatch, rows: int, tokens: int) -> Microbatch:
    """The batch with rows and places of padding behind its own."""
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
    )


def trainable_length(segment: Segment) -> int:
    """Tokens up to the last sampled one. Tool results behind it (an attempt cut short) take part in no loss."""
    sampled = np.flatnonzero(segment.loss_mask_T)
    return int(sampled[-1]) + 1 if len(sampled) else len(segment.token_ids_T)


def cost(shape: tuple[int, ...]) -> float:
    """Relative work of a microbatch of [rows, tokens]: linear in tokens plus attention's square."""
    rows, tokens = shape
    return rows * tokens * (1 + tokens / ATTENTION_PARITY_TOKENS)


def _stack(
    segments: Sequence[Segment], advantages: Sequence[float], indices: Sequence[int], bucket: int
) -> Microbatch:
    rows = len(segments)
    routes_shape = segments[0].routed_experts_TLK.shape[1:]
    batch = Microbatch(
        sample_indices_B=np.asarray(indices, dtype=np.int64),
        tokens_BT=np.zeros((rows, bucket), dtype=np.int64),
        loss_mask_BT=np.zeros((rows, bucket), dtype=bool),
        padding_BT=np.ones((rows, bucket), dtype=bool),
        rollout_logprobs_BT=np.zeros((rows, bucket), dtype=np.float32),
        weight_versions_BT=np.full((rows, bucket), -1, dtype=np.int64),
        is_kept_cache_BT=np.zeros((rows, bucket), dtype=bool),
        advantages_B=np.asarray(advantages, dtype=np.float32),
        temperatures_B=np.array([s.sampling.temperature for s in segments], dtype=np.float32),
        routes_BTLK=np.full((rows, bucket, *routes_shape), MISSING_ROUTE, dtype=np.int16),
    )
    for row, segment in enumerate(segments):
        length = trainable_length(segment)
        batch.tokens_BT[row, :length] = segment.token_ids_T[:length]
        batch.loss_mask_BT[row, :length] = segment.loss_mask_T[:length]
        batch.padding_BT[row, :length] = False
        batch.rollout_logprobs_BT[row, :length] = segment.logprobs_T[:length]
        batch.weight_versions_BT[row, :length] = segment.weight_versions_T[:length]
        is_kept_T = segment.cache_versions_T[:length] < segment.weight_versions_T[:length]
        batch.is_kept_cache_BT[row, :length] = is_kept_T
        batch.routes_BTLK[row, :length] = segment.routed_experts_TLK[:length]
    return batch

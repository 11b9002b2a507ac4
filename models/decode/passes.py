"""One step's forward pass and samples. The engine applies the samples to the slots.

Shapes: B decoding slots, R sampled rows, m rows per decoding slot, N rows, V vocabulary, D model
width, L layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.config import CachePolicy
from ostinato.models.decode.sampling import exponential_noise, sample_rows
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from ostinato.models.decode.compiled.native import NativeTrunk


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive positions of one slot."""

    slot: int
    start: int  # first position fed
    end: int  # one past the last position fed


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of one pass. Arrays over R hold m rows per slot, slot after slot."""

    slots: np.ndarray  # decoding slots, then slots with a completed prompt
    tokens_R: np.ndarray
    logprobs_R: np.ndarray
    hidden_RD: np.ndarray
    logits_RV: np.ndarray  # a view that the next pass overwrites


class DecodePasses:
    """Passes over a `SlotCache`."""

    def __init__(
        self, table: SlotTable, cache: SlotCache, native: "NativeTrunk", policy: CachePolicy
    ) -> None:
        self._table, self._cache, self._native = table, cache, native
        # When keys are recomputed, the first recorded routes stay, since the tokens were sampled
        # with them.
        is_kept = policy is CachePolicy.KEEP
        self._first_free_S = np.zeros_like(table.routed_S) if is_kept else table.routed_S

    def decode(self, weights: DecodeWeights, slots_B: np.ndarray, width: int) -> Sampled:
        """Runs a step without prompts: `width` rows of each slot, all but the first being drafts."""
        table = self._table
        tokens_R, logprobs_R, is_limited = self._native.decode_step(
            weights,
            table.decode_arrays,
            slots_B,
            width,
            self._first_free_S,
            self._cache.routes_SCLK,
        )
        hidden_RD, logits_RV = self._native.last_rows(len(tokens_R))
        if is_limited:
            slots_R = np.repeat(slots_B, width)
            positions_R = table.context_S[slots_R] + np.tile(np.arange(width), len(slots_B))
            self._draw_limited(slots_R, positions_R, logits_RV, tokens_R, logprobs_R)
        return Sampled(slots_B, tokens_R, logprobs_R, hidden_RD, logits_RV)

    def feed(
        self, weights: DecodeWeights, slots_B: np.ndarray, spans: Sequence[PrefillSpan]
    ) -> Sampled:
        """Runs a step with prompts: samples after every decoding slot's row and completed prompt."""
        table = self._table
        lengths = [span.end - span.start for span in spans]
        slots_N = np.concatenate([slots_B, np.repeat([span.slot for span in spans], lengths)])
        positions_N = np.concatenate(
            [table.cached_S[slots_B], *(np.arange(span.start, span.end) for span in spans)]
        )
        tokens_N = table.tokens_SC[slots_N, positions_N]
        routes_NLK = self._native.forward(weights, tokens_N, positions_N, slots_N)
        is_free_N = positions_N >= self._first_free_S[slots_N]
        self._cache.routes_SCLK[slots_N[is_free_N], positions_N[is_free_N]] = routes_NLK[is_free_N]
        last_rows = len(slots_B) + np.cumsum(lengths) - 1
        is_done = [span.end == table.context_S[span.slot] for span in spans]
        rows_R = np.concatenate([np.arange(len(slots_B)), last_rows[is_done]])
        slots_R = slots_N[rows_R]
        hidden_RD, logits_RV = self._native.project(weights, rows_R)
        places_R = table.context_S[slots_R]
        tokens_R, logprobs_R = self._native.sample(
            table.seed_keys_S[slots_R], places_R, table.temperature_S[slots_R]
        )
        self._draw_limited(slots_R, places_R, logits_RV, tokens_R, logprobs_R)
        return Sampled(slots_R, tokens_R, logprobs_R, hidden_RD, logits_RV)

    def _draw_limited(
        self,
        slots_R: np.ndarray,
        positions_R: np.ndarray,
        logits_RV: np.ndarray,
        tokens_R: np.ndarray,
        logprobs_R: np.ndarray,
    ) -> None:
        """Replaces the samples of rows that top-k or top-p limits."""
        table = self._table
        rows = np.flatnonzero((table.top_p_S[slots_R] < 1) | (table.top_k_S[slots_R] > 0))
        if not len(rows):
            return
        slots = slots_R[rows]
        noise_RV = exponential_noise(
            logits_RV.shape[1], table.seed_keys_S[slots], positions_R[rows]
        )
        tokens_R[rows], logprobs_R[rows] = sample_rows(
            torch.from_numpy(logits_RV[rows]),
            table.temperature_S[slots],
            table.top_p_S[slots],
            table.top_k_S[slots],
            noise_RV,
        )

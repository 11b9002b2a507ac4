"""One step's forward pass and samples, on the CPU: eager torch or compiled loops.

It advances no slot: what the samples mean for a request is the engine's.

Shapes: B decoding slots, R sampled rows, m rows a decoding slot, N rows, V vocabulary, D model
width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ostinato.models.decode.batch import PrefillSpan, place_rows, plan_batch
from ostinato.models.decode.cache import RouteTable, SlotCache
from ostinato.models.decode.config import CachePolicy
from ostinato.models.decode.drafts.speculation import Drafted
from ostinato.models.decode.forward import Trunk, linear
from ostinato.models.decode.sampling import NoiseSource, SamplingRules, sample_rows
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from ostinato.models.decode.compiled.trunk import NativeTrunk


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of one pass. The arrays of R are slot after slot, m rows each."""

    slots: np.ndarray  # decoding slots, then those whose prompt is complete
    tokens_R: np.ndarray
    logprobs_R: np.ndarray
    hidden_RD: Tensor | None  # None: nothing was sampled


class DecodePasses:
    """Passes over a `SlotCache`."""

    def __init__(
        self,
        table: SlotTable,
        cache: SlotCache,
        trunk: Trunk,
        native: "NativeTrunk | None",
        noise: NoiseSource,
        policy: CachePolicy,
    ) -> None:
        self._table, self._cache, self._noise = table, cache, noise
        self._trunk, self._native = trunk, native
        self._policy = policy
        self._recorded_SCLK = cache.recorded_SCLK
        self._first_position_S = np.zeros(len(table.context_S), dtype=np.int64)

    def run(
        self,
        weights: DecodeWeights,
        decode_slots_B: np.ndarray,
        spans: Sequence[PrefillSpan],
        drafted: Drafted | None,
    ) -> Sampled:
        """Feeds all rows and samples after every decode row and completed prompt."""
        table, width = self._table, 1 if drafted is None else drafted.width
        if self._native is not None and not spans:
            return self._decode_native(self._native, weights, decode_slots_B, width)
        hidden_ND = self._feed(weights, decode_slots_B, spans, width)
        rows_R, slots = np.arange(len(decode_slots_B) * width), decode_slots_B
        if spans:
            done = completed(table, spans)
            last_rows = [span.first_row + span.end - span.start - 1 for span in done]
            rows_R = np.concatenate([rows_R, np.array(last_rows, dtype=np.int64)])
            slots = np.array([*slots, *(span.slot for span in done)], dtype=np.int64)
        if not len(slots):
            return Sampled(slots, np.zeros(0, dtype=np.int64), np.zeros(0, np.float32), None)
        if hidden_ND is None:
            assert self._native is not None
            hidden_RD, logits_RV = self._native.project(weights, rows_R)
        else:
            hidden_RD = hidden_ND.index_select(0, torch.from_numpy(rows_R)) if spans else hidden_ND
            logits_RV = linear(hidden_RD, weights.embedding_VD)
        noise_BmV = None if drafted is None else drafted.noise_BmV
        tokens_R, logprobs_R = self._draw(slots, width, logits_RV, noise_BmV)
        return Sampled(slots, tokens_R, logprobs_R, hidden_RD)

    def _decode_native(
        self, native: "NativeTrunk", weights: DecodeWeights, slots_B: np.ndarray, width: int
    ) -> Sampled:
        """A step without prompts."""
        table = self._table
        is_kept = self._policy is CachePolicy.KEEP
        tokens_R, logprobs_R, is_limited = native.decode_step(
            weights,
            table.decode_arrays,
            slots_B,
            width,
            self._first_position_S if is_kept else table.routed_S,
            self._recorded_SCLK,
        )
        hidden_RD, logits_RV = native.last_rows(len(tokens_R))
        if is_limited:
            slots_R = np.repeat(slots_B, width)
            positions_R = table.context_S[slots_R] + np.tile(np.arange(width), len(slots_B))
            self._draw_limited(slots_R, positions_R, logits_RV, tokens_R, logprobs_R)
        return Sampled(slots_B, tokens_R, logprobs_R, hidden_RD)

    def _draw_limited(
        self,
        slots_R: np.ndarray,
        positions_R: np.ndarray,
        logits_RV: Tensor,
        tokens_R: np.ndarray,
        logprobs_R: np.ndarray,
    ) -> None:
        """Draws the rows that top-k or top-p limits, in place of what stands there."""
        rules = self._rules(slots_R)
        rows = np.flatnonzero(rules.is_limited_R)
        if len(rows):
            noise_RV = self._noise.exponential(
                self._table.seed_keys_S[slots_R[rows]], positions_R[rows]
            )
            limited = sample_rows(logits_RV[torch.from_numpy(rows)], rules.of(rows), noise_RV)
            tokens_R[rows], logprobs_R[rows] = limited

    def _rules(self, slots_R: np.ndarray) -> SamplingRules:
        table = self._table
        return SamplingRules(
            table.temperature_S[slots_R], table.top_p_S[slots_R], table.top_k_S[slots_R]
        )

    def _feed(
        self,
        weights: DecodeWeights,
        decode_slots_B: np.ndarray,
        spans: Sequence[PrefillSpan],
        width: int,
    ) -> Tensor | None:
        """One forward pass. Hidden states [N, D], None where the compiled trunk keeps them."""
        table = self._table
        cached_B, tokens_SC = table.cached_S[decode_slots_B], table.tokens_SC
        if self._native is None:
            plan = plan_batch(self._cache, tokens_SC, decode_slots_B, cached_B, width, spans)
            hidden_ND, routes_NLK = self._trunk.forward(weights, plan, self._cache)
            store_routes(self._cache, table, self._policy, plan.slots, plan.positions, routes_NLK)
            return hidden_ND
        slots_N, positions_N = place_rows(decode_slots_B, cached_B, width, spans)
        tokens_N = tokens_SC[slots_N, positions_N]
        routes_NLK = self._native.forward(weights, tokens_N, positions_N, slots_N)
        store_routes(self._cache, table, self._policy, slots_N, positions_N, routes_NLK)
        return None

    def _draw(
        self, slots_B: np.ndarray, width: int, logits_RV: Tensor, noise_BmV: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws the next `width` tokens of each slot by the noise of their places."""
        table = self._table
        slots_R = np.repeat(slots_B, width) if width > 1 else slots_B
        rules = self._rules(slots_R)
        positions_R = table.context_S[slots_R]
        if width > 1:
            positions_R = positions_R + np.tile(np.arange(width), len(slots_B))
        if self._native is not None:
            drawn = self._native.sample(
                table.seed_keys_S[slots_R], positions_R, rules.temperature_R
            )
            self._draw_limited(slots_R, positions_R, logits_RV, *drawn)
            return drawn
        if noise_BmV is None:
            noise_BmV = self._noise.exponential(table.seed_keys_S[slots_R], positions_R)
        return sample_rows(logits_RV, rules, noise_BmV.reshape(len(slots_R), -1))


def completed(table: SlotTable, spans: Sequence[PrefillSpan]) -> list[PrefillSpan]:
    """The spans that end their prompt."""
    return [span for span in spans if span.end == table.context_S[span.slot]]


def store_routes(
    routes: RouteTable,
    table: SlotTable,
    policy: CachePolicy,
    slots_N: np.ndarray,
    positions_N: np.ndarray,
    routes_NLK: Tensor,
) -> None:
    """Records routes, save where a recomputation meets recorded ones: those made the tokens."""
    if policy is CachePolicy.KEEP:
        routes.write_routes(slots_N, positions_N, routes_NLK)
        return
    is_new_N = positions_N >= table.routed_S[slots_N]
    if is_new_N.any():
        rows = routes_NLK[torch.from_numpy(np.flatnonzero(is_new_N))]
        routes.write_routes(slots_N[is_new_N], positions_N[is_new_N], rows)

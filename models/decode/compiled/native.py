"""Calls of the compiled decode step, and the scratch memory of one engine that they use.

Shapes: N rows, R rows whose logits are asked for, L layers, S slots, K experts per token, D model
width, V vocabulary, B slots.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.compiled.packed import aligned_floats, whole_vectors
from ostinato.models.decode.compiled.sampling import race_rows, run_draft
from ostinato.models.decode.compiled.trunk import MAX_LINES, run_decode_step, run_head, run_trunk
from ostinato.models.decode.weights import DecodeWeights, expert_sizes
from ostinato.models.network.rope import stretch_frequencies
from ostinato.models.spec import ModelSpec

_LOGITS = 19  # place among the buffers
_Opened = tuple[np.ndarray, np.ndarray, np.ndarray]


class NativeTrunk:
    """Compiled forward pass over a `SlotCache`. The next call overwrites views returned before."""

    def __init__(self, spec: ModelSpec, cache: SlotCache, rows: int) -> None:
        heads, groups, head_width = spec.num_attention_heads, spec.num_query_groups, spec.head_dim
        slots, positions = cache.routes_SCLK.shape[:2]
        experts, per_token, inner = expert_sizes(spec)
        has_experts = spec.num_moe_layers > 0
        width, lines = spec.hidden_size, max(MAX_LINES, heads // groups)
        self._width, self._vocab = width, spec.vocab_size
        self._step = whole_vectors(spec.vocab_size)
        self._constants = (
            (heads, groups, head_width, positions, slots),
            (width, experts, whole_vectors(experts), inner, spec.num_layers, per_token),
            np.float32(spec.norm_epsilon),
            self._vocab,
            self._step,
            (spec.qk_norm, spec.qkv_bias),
            (
                spec.router_score == "softmax",
                spec.router_normalizes or not has_experts,
                np.float32(spec.router_scale if has_experts else 1.0),
            ),
        )
        self._hidden, self._normal = aligned_floats(rows * width), aligned_floats(rows * width)
        self._chosen, self._logits = aligned_floats(rows * width), aligned_floats(0)
        self._raced_V = aligned_floats(self._vocab)
        self._routes_NLK = np.zeros((rows, spec.num_layers, per_token), np.int64)
        self._draft_inner = aligned_floats(slots * 2 * spec.mtp_hidden_size)
        self._arrays = (
            self._hidden,
            self._normal,
            aligned_floats(rows * (heads + 2 * groups) * head_width),  # queries, keys, values
            aligned_floats(rows * heads * head_width),  # attended
            aligned_floats(lines * head_width),  # queries that attend together
            aligned_floats(lines * positions),  # their scores
            aligned_floats(rows * whole_vectors(experts)),  # the router's logits
            self._routes_NLK,
            aligned_floats(rows * per_token),  # shares of experts
            aligned_floats(rows * width),  # rows of one expert
            aligned_floats(rows * 2 * inner),  # its inner rows
            aligned_floats(rows * width),  # its outer rows
            aligned_floats(experts),  # scores of experts
            np.zeros(experts + 1, np.int64),  # ends of experts in the list
            np.zeros(rows * per_token, np.int64),  # the list of rows by expert
            cache.keys_LSGdC,
            cache.values_LSGCd,
            rotation_table(spec, positions),
            self._chosen,
            self._logits,
            self._raced_V,
        )
        self._buffers = _addresses(self._arrays)
        self._opened: tuple[DecodeWeights, _Opened] | None = None

    def forward(
        self,
        weights: DecodeWeights,
        tokens_N: np.ndarray,
        positions_N: np.ndarray,
        slots_N: np.ndarray,
    ) -> np.ndarray:
        """Feeds N rows. Returns routes [N, L, K], a view."""
        run_trunk(
            self._open(weights), self._constants, self._buffers, tokens_N, positions_N, slots_N
        )
        return self._routes_NLK[: len(tokens_N)]

    def project(self, weights: DecodeWeights, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the normed hidden states [R, D] and logits [R, V] of some of the rows just fed."""
        self._grow_logits(len(rows_R))
        run_head(self._open(weights), self._constants, self._buffers, rows_R)
        return self.last_rows(len(rows_R))

    def sample(
        self, seed_keys_R: np.ndarray, positions_R: np.ndarray, temperature_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities from the logits computed last, ignoring top-k and top-p."""
        tokens_R = np.empty(len(seed_keys_R), np.int64)
        logprobs_R = np.empty(len(seed_keys_R), np.float32)
        race_rows(
            self._logits,
            self._step,
            self._vocab,
            seed_keys_R,
            positions_R,
            temperature_R,
            self._raced_V,
            tokens_R,
            logprobs_R,
        )
        return tokens_R, logprobs_R

    def decode_step(
        self,
        weights: DecodeWeights,
        table: tuple[np.ndarray, ...],
        slots_B: np.ndarray,
        width: int,
        first_free_S: np.ndarray,
        routes_SCLK: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Does `forward`, `project` and `sample` in one call: feeds `width` rows per slot and
        samples after each. Returns (tokens [R], log-probabilities [R], whether a row is limited by
        top-k or top-p). `table`: `SlotTable.decode_arrays`. A slot's rows after its first sample
        that differs from the draft fed next are not sampled and hold zeros.
        """
        rows = len(slots_B) * width
        self._grow_logits(rows)
        tokens_R, logprobs_R = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
        is_limited = run_decode_step(
            self._open(weights),
            self._constants,
            self._buffers,
            table,
            slots_B,
            width,
            first_free_S,
            routes_SCLK,
            tokens_R,
            logprobs_R,
        )
        return tokens_R, logprobs_R, bool(is_limited)

    def last_rows(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of the hidden states [R, D] and logits [R, V] of the last call."""
        hidden_RD = self._chosen[: rows * self._width].reshape(rows, self._width)
        return hidden_RD, self._logits_view(rows)

    def draft(
        self, weights: DecodeWeights, depth: int, hidden_BD: np.ndarray, tokens_B: np.ndarray
    ) -> np.ndarray:
        """View of one draft layer's logits after `tokens_B`. Overwrites `hidden_BD` for the next depth."""
        self._grow_logits(len(tokens_B))
        run_draft(
            tuple(weights.drafts[depth]),
            weights.trunk.embedding,
            weights.trunk.head,
            self._width,
            self._step,
            self._constants[2],
            tokens_B,
            hidden_BD.reshape(-1),
            (self._normal, self._chosen, self._draft_inner, self._logits),
        )
        return self._logits_view(len(tokens_B))

    def _grow_logits(self, rows: int) -> None:
        if len(self._logits) < rows * self._step:
            self._logits = aligned_floats(rows * self._step)
            self._buffers[_LOGITS] = self._logits.ctypes.data

    def _open(self, weights: DecodeWeights) -> _Opened:
        """Addresses of the packed weights, which stay alive while the addresses are cached, and two
        weights as arrays: the embedding, whose dtype selects the compiled loops, and the norms,
        which may be empty.
        """
        if self._opened is None or self._opened[0] is not weights:
            trunk = weights.trunk
            self._opened = weights, (_addresses(trunk), trunk.embedding, trunk.norms)
        return self._opened[1]

    def _logits_view(self, rows: int) -> np.ndarray:
        logits = self._logits[: rows * self._step].reshape(rows, self._step)
        return logits[:, : self._vocab]


def rotation_table(spec: ModelSpec, positions: int) -> np.ndarray:
    """RoPE as (cosine, sine) of each pair of each position [C, d]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    frequencies = spec.rope_base**-exponents
    if spec.rope_bands is not None:
        frequencies = stretch_frequencies(frequencies, spec.rope_bands)
    scaled = torch.arange(positions, dtype=torch.float64) / spec.rope_scaling_factor
    angles = torch.outer(scaled, frequencies)
    rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    return torch.view_as_real(rotation).flatten(1).numpy()


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)

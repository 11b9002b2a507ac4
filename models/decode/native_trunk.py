"""One decode step of the whole trunk as one compiled function, in float32 on the CPU.

Owns `run_trunk` and `NativeTrunk`, which holds
its scratch memory. Enters: packed weights, the rows of a step, the slot cache (written in place).
Leaves: hidden states, routes, logits. What eager torch spends on some 170 operations a step this
spends on one call. Prompts are fed by the eager trunk; both use one cache. Needs numba (extra
`cpu`).

Shapes: N rows, L layers, S slots, G key/value heads, H query heads, R query heads a group, d head
width, C positions, D model width, E experts, K experts a token, F expert width, V vocabulary.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from models.decode.cache import SlotCache
from models.decode.native_kernels import (
    attend_row,
    choose_experts,
    gate_row,
    multiply_packed,
    normalize_row,
    rotate_heads,
)
from models.decode.native_sampling import race_rows, run_draft
from models.decode.native_tiles import JIT
from models.decode.packed import LANES, PackedWeights, whole_vectors
from models.decode.weights import DecodeWeights
from models.spec import ModelSpec


def check_native(spec: ModelSpec) -> None:
    """Raises ValueError on a shape whose rows do not fill whole vectors."""
    for name in ("hidden_size", "head_dim", "expert_hidden_size"):
        if getattr(spec, name) % LANES:
            raise ValueError(
                f"{name}={getattr(spec, name)}, wanted a multiple of {LANES} for native decoding"
            )


@numba.njit(**JIT)
def _attend(rows, shape, layer, qkv, slots_N, positions_N, keys, values, scores, attended):
    """Writes keys and values of all rows, then attends row by row."""
    heads, groups, width, positions, num_slots = shape
    step = (heads + 2 * groups) * width
    per_group = heads // groups
    for row in range(rows):
        at = positions_N[row]
        for group in range(groups):
            memory = ((layer * num_slots + slots_N[row]) * groups + group) * width * positions
            key = row * step + (heads + group) * width
            value = row * step + (heads + groups + group) * width
            for place in range(width):
                keys[memory + place * positions + at] = qkv[key + place]
                values[memory + at * width + place] = qkv[value + place]
    for row in range(rows):
        for group in range(groups):
            memory = ((layer * num_slots + slots_N[row]) * groups + group) * width * positions
            attend_row(
                qkv,
                row * step + group * per_group * width,
                keys,
                memory,
                values,
                memory,
                per_group,
                width,
                positions,
                positions_N[row] + 1,
                scores,
                attended,
                (row * heads + group * per_group) * width,
            )


@numba.njit(**JIT)
def _mix_experts(
    rows, sizes, layer, normal, logits_E, bias, up, down, hidden, routes_NLK, shares_NK, scratch
):
    """Adds the chosen experts' outputs to `hidden`: rows of one expert are multiplied together."""
    width, num_experts, padded_experts, inner_width = sizes
    gathered, inner, outer, scores_E, members_N, ranks_N = scratch
    for row in range(rows):
        choose_experts(
            logits_E,
            row * padded_experts,
            bias,
            layer * num_experts,
            num_experts,
            scores_E,
            routes_NLK[row, layer],
            shares_NK[row],
        )
    for expert in range(num_experts):
        count = 0
        for row in range(rows):
            for rank in range(shares_NK.shape[1]):
                if routes_NLK[row, layer, rank] == expert:
                    members_N[count] = row
                    ranks_N[count] = rank
                    count += 1
        if count == 0:
            continue
        for member in range(count):
            first = members_N[member] * width
            gathered[member * width : (member + 1) * width] = normal[first : first + width]
        inner[: count * 2 * inner_width] = np.float32(0.0)
        outer[: count * width] = np.float32(0.0)
        place = layer * num_experts + expert
        multiply_packed(
            gathered,
            0,
            width,
            up,
            place * width * 2 * inner_width,
            inner,
            0,
            2 * inner_width,
            count,
            width,
            2 * inner_width,
        )
        for member in range(count):
            gate_row(inner, member * 2 * inner_width, inner_width)
        multiply_packed(
            inner,
            0,
            2 * inner_width,
            down,
            place * inner_width * width,
            outer,
            0,
            width,
            count,
            inner_width,
            width,
        )
        for member in range(count):
            share = shares_NK[members_N[member], ranks_N[member]]
            target = hidden[members_N[member] * width : (members_N[member] + 1) * width]
            source = outer[member * width : (member + 1) * width]
            for column in range(width):
                target[column] += share * source[column]


@numba.njit(**JIT)
def run_trunk(
    weights, shape, sizes, epsilon, tokens_N, positions_N, slots_N, memory, rotation, buffers
):
    """All layers for N rows; see the module."""
    embedding, _, qkv_w, qk_scale, output_w, gate_w, gate_bias, up, down, final_norm = weights
    keys, values = memory
    hidden, normal, qkv, attended, scores, logits_E, routes_NLK, shares_NK, scratch = buffers
    heads, groups, head_width, _, _ = shape
    width, _, padded_experts, _ = sizes
    rows, qkv_width = len(tokens_N), (heads + 2 * groups) * head_width
    for row in range(rows):
        first = tokens_N[row] * width
        hidden[row * width : (row + 1) * width] = embedding[first : first + width]
    for layer in range(routes_NLK.shape[1]):
        for row in range(rows):
            normalize_row(hidden, row * width, normal, row * width, width, epsilon)
        qkv[: rows * qkv_width] = np.float32(0.0)
        at = layer * width * qkv_width
        multiply_packed(normal, 0, width, qkv_w, at, qkv, 0, qkv_width, rows, width, qkv_width)
        for row in range(rows):
            rotate_heads(
                qkv,
                row * qkv_width,
                heads + groups,
                head_width,
                qk_scale,
                layer * (heads + groups) * head_width,
                rotation,
                positions_N[row] * head_width,
                epsilon,
            )
        _attend(rows, shape, layer, qkv, slots_N, positions_N, keys, values, scores, attended)
        query_width = heads * head_width
        at = layer * query_width * width
        multiply_packed(
            attended, 0, query_width, output_w, at, hidden, 0, width, rows, query_width, width
        )
        for row in range(rows):
            normalize_row(hidden, row * width, normal, row * width, width, epsilon)
        logits_E[: rows * padded_experts] = np.float32(0.0)
        at = layer * width * padded_experts
        multiply_packed(
            normal, 0, width, gate_w, at, logits_E, 0, padded_experts, rows, width, padded_experts
        )
        _mix_experts(
            rows,
            sizes,
            layer,
            normal,
            logits_E,
            gate_bias,
            up,
            down,
            hidden,
            routes_NLK,
            shares_NK,
            scratch,
        )
    for row in range(rows):
        normalize_row(hidden, row * width, hidden, row * width, width, epsilon)
        final = hidden[row * width : (row + 1) * width]
        for column in range(width):
            final[column] *= final_norm[column]


@numba.njit(**JIT)
def run_head(head, hidden, rows_R, width, vocab, chosen, logits):
    """Gathers the hidden states of some rows and computes their logits."""
    rows = len(rows_R)
    for index in range(rows):
        first = rows_R[index] * width
        chosen[index * width : (index + 1) * width] = hidden[first : first + width]
    logits[: rows * vocab] = np.float32(0.0)
    multiply_packed(chosen, 0, width, head, 0, logits, 0, vocab, rows, width, vocab)


class NativeTrunk:
    """Scratch memory of one engine and the calls."""

    def __init__(self, spec: ModelSpec, rotation_C1d: Tensor, cache: SlotCache, rows: int) -> None:
        check_native(spec)
        heads, groups, head_width = spec.num_attention_heads, spec.num_query_groups, spec.head_dim
        positions, slots = cache.positions, cache.keys_LSGdC.shape[1]
        experts, width, inner = spec.num_experts, spec.hidden_size, spec.expert_hidden_size
        self._width, self._vocab = width, spec.vocab_size
        self._step = whole_vectors(spec.vocab_size)
        self._memory = (cache.keys_LSGdC.view(-1).numpy(), cache.values_LSGCd.view(-1).numpy())
        self._rotation = torch.view_as_real(rotation_C1d).reshape(-1).numpy()
        self._shape = (heads, groups, head_width, positions, slots)
        self._sizes = (width, experts, whole_vectors(experts), inner)
        self._epsilon = np.float32(spec.norm_epsilon)
        self._hidden, self._normal = _floats(rows * width), _floats(rows * width)
        self._chosen, self._logits = _floats(rows * width), _floats(0)
        self._raced_V = _floats(self._vocab)
        self._routes_NLK = np.zeros((rows, spec.num_layers, spec.experts_per_token), np.int64)
        self._draft_inner = _floats(slots * 2 * spec.mtp_hidden_size)
        integers = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._buffers = (
            self._hidden,
            self._normal,
            _floats(rows * (heads + 2 * groups) * head_width),
            _floats(rows * heads * head_width),
            _floats(heads // groups * positions),
            _floats(rows * whole_vectors(experts)),
            self._routes_NLK,
            np.zeros((rows, spec.experts_per_token), np.float32),
            (
                _floats(rows * width),
                _floats(rows * 2 * inner),
                _floats(rows * width),
                _floats(experts),
                *integers,
            ),
        )

    def forward(
        self,
        weights: DecodeWeights,
        tokens_N: np.ndarray,
        positions_N: np.ndarray,
        slots_N: np.ndarray,
    ) -> Tensor:
        """Feeds N rows; returns routes [N, L, K]."""
        run_trunk(
            _packed(weights).arrays(),
            self._shape,
            self._sizes,
            self._epsilon,
            tokens_N,
            positions_N,
            slots_N,
            self._memory,
            self._rotation,
            self._buffers,
        )
        return torch.from_numpy(self._routes_NLK[: len(tokens_N)])

    def project(self, weights: DecodeWeights, rows_R: np.ndarray) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [R, D] and logits [R, V] of some rows just fed; views
        that the next call overwrites.
        """
        self._make_room(len(rows_R))
        packed = _packed(weights)
        run_head(
            packed.head, self._hidden, rows_R, self._width, self._step, self._chosen, self._logits
        )
        return self.last_rows(len(rows_R))

    def sample(
        self, seed_keys_R: np.ndarray, positions_R: np.ndarray, temperature_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities by the logits just made, unlimited by top-k and top-p."""
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
        """Feeds `width` rows a slot and samples after each, `forward`, `project` and `sample` in one
        call; returns (tokens [R], log-probabilities [R], whether a row is limited by top-k or
        top-p). `table` is what `native_step` names so.
        """
        from models.decode.native_step import run_decode_step  # noqa: PLC0415 - imports this module

        rows = len(slots_B) * width
        self._make_room(rows)
        tokens_R, logprobs_R = np.empty(rows, np.int64), np.empty(rows, np.float32)
        is_limited = run_decode_step(
            _packed(weights).arrays(),
            (self._shape, self._sizes, self._epsilon, self._vocab, self._step),
            (*self._memory, self._rotation),
            self._buffers,
            (self._chosen, self._logits, self._raced_V),
            table,
            slots_B,
            width,
            first_free_S,
            routes_SCLK,
            tokens_R,
            logprobs_R,
        )
        return tokens_R, logprobs_R, bool(is_limited)

    def last_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """Hidden states [R, D] and logits [R, V] that the call before left; views that the next one
        overwrites.
        """
        hidden = torch.from_numpy(self._chosen[: rows * self._width])
        return hidden.view(rows, self._width), self._logits_view(rows)

    def draft(
        self, weights: DecodeWeights, depth: int, hidden_BD: np.ndarray, tokens_B: np.ndarray
    ) -> Tensor:
        """One draft layer: logits of the token after `tokens_B`; `hidden_BD` becomes the next
        depth's.
        """
        self._make_room(len(tokens_B))
        packed = _packed(weights)
        run_draft(
            packed.drafts[depth].arrays(),
            packed.embedding_VD,
            packed.head,
            self._width,
            self._step,
            self._epsilon,
            tokens_B,
            hidden_BD.reshape(-1),
            (self._normal, self._chosen, self._draft_inner, self._logits),
        )
        return self._logits_view(len(tokens_B))

    def _make_room(self, rows: int) -> None:
        if len(self._logits) < rows * self._step:
            self._logits = _floats(rows * self._step)

    def _logits_view(self, rows: int) -> Tensor:
        logits = torch.from_numpy(self._logits[: rows * self._step]).view(rows, self._step)
        return logits[:, : self._vocab]


def _packed(weights: DecodeWeights) -> PackedWeights:
    if weights.packed is None:
        raise ValueError(f"weights version {weights.version} were prepared without native=True")
    return weights.packed


def _floats(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.float32)

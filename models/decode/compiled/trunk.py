"""One decode step of the whole trunk as one compiled function, in float32 on the CPU.

What eager torch spends on some 170 operations a step this spends on one call.

Shapes: N rows, L layers, S slots, G key/value heads, H query heads, R query heads a group, d head
width, C positions, D model width, E experts, K experts per token, F expert width, V vocabulary.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.compiled.kernels import (
    attend_rows,
    choose_experts,
    copy_floats,
    gate_row,
    multiply_packed,
    normalize_row,
    rotate_heads,
)
from ostinato.models.decode.compiled.packed import (
    LANES,
    PackedWeights,
    aligned_floats,
    whole_vectors,
)
from ostinato.models.decode.compiled.sampling import race_rows, run_draft
from ostinato.models.decode.compiled.vectors import BARE, floats_at, integers_at
from ostinato.models.decode.weights import DecodeWeights
from ostinato.models.spec import ModelSpec

_LOGITS = 19  # place among the buffers
_MOST_LINES = 16  # query heads of one group, over rows, that attend together


def check_native(spec: ModelSpec) -> None:
    """Raises ValueError on a shape whose rows do not fill whole vectors."""
    for name in ("hidden_size", "head_dim", "expert_hidden_size"):
        if getattr(spec, name) % LANES:
            raise ValueError(
                f"{name}={getattr(spec, name)}, wanted a multiple of {LANES} for native decoding"
            )


@numba.njit(**BARE)
def _remember(rows, shape, layer, qkv, slots_N, positions_N, keys, values):
    """Writes keys and values of all rows."""
    heads, groups, width, positions, num_slots = shape
    step = (heads + 2 * groups) * width
    for row in range(rows):
        at = positions_N[row]
        for group in range(groups):
            memory = ((layer * num_slots + slots_N[row]) * groups + group) * width * positions
            key = row * step + (heads + group) * width
            for place in range(width):
                keys[memory + place * positions + at] = qkv[key + place]
            copy_floats(qkv, key + groups * width, values, memory + at * width, width)


@numba.njit(**BARE)
def _attend(rows, shape, layer, qkv, slots_N, positions_N, keys, values, buffers, attended):
    """Attention of all rows. Those at consecutive positions of one slot attend together."""
    heads, groups, width, positions, num_slots = shape
    step = (heads + 2 * groups) * width
    per_group = heads // groups
    most = max(1, _MOST_LINES // per_group)
    first = 0
    while first < rows:
        last = first + 1
        while (
            last < min(rows, first + most)
            and slots_N[last] == slots_N[first]
            and positions_N[last] == positions_N[last - 1] + 1
        ):
            last += 1
        for group in range(groups):
            head = group * per_group * width
            attend_rows(
                qkv,
                first * step + head,
                step,
                keys,
                values,
                ((layer * num_slots + slots_N[first]) * groups + group) * width * positions,
                last - first,
                per_group,
                width,
                positions,
                positions_N[first] + 1,
                buffers,
                attended,
                first * heads * width + head,
                heads * width,
            )
        first = last


@numba.njit(**BARE)
def _route(rows, sizes, layer, logits_E, bias, chosen, scratch):
    """Chooses each row's experts and lists their rows, those of one expert together and ascending,
    as row * K + rank. Each expert's end in the list is left too.
    """
    _, num_experts, padded_experts, _, layers, per_token = sizes
    routes_NLK, shares_NK = chosen
    _, _, _, scores_E, ends_E, members = scratch
    for expert in range(num_experts + 1):
        ends_E[expert] = 0
    for row in range(rows):
        at = (row * layers + layer) * per_token
        route = routes_NLK[at : at + per_token]
        choose_experts(
            logits_E,
            row * padded_experts,
            bias,
            layer * num_experts,
            num_experts,
            scores_E,
            route,
            shares_NK[row * per_token : (row + 1) * per_token],
        )
        for rank in range(per_token):
            ends_E[route[rank] + 1] += 1
    for expert in range(num_experts):
        ends_E[expert + 1] += ends_E[expert]
    for row in range(rows):
        for rank in range(per_token):
            expert = routes_NLK[(row * layers + layer) * per_token + rank]
            members[ends_E[expert]] = row * per_token + rank
            ends_E[expert] += 1


@numba.njit(**BARE)
def _mix_experts(rows, sizes, layer, normal, logits_E, experts, hidden, chosen, scratch):
    """Adds the chosen experts' outputs to `hidden`: rows of one expert are multiplied together."""
    width, num_experts, _, inner_width, _, per_token = sizes
    bias, up, down = experts
    _, shares_NK = chosen
    gathered, inner, outer, _, ends_E, members = scratch
    double = 2 * inner_width
    _route(rows, sizes, layer, logits_E, bias, chosen, scratch)
    first = 0
    for expert in range(num_experts):
        count = ends_E[expert] - first
        if count == 0:
            continue
        for member in range(count):
            row = members[first + member] // per_token
            copy_floats(normal, row * width, gathered, member * width, width)
        place = layer * num_experts + expert
        at = place * width * double
        multiply_packed(gathered, 0, width, up, at, inner, 0, double, count, width, double, 1)
        for member in range(count):
            gate_row(inner, member * double, inner_width)
        at = place * inner_width * width
        multiply_packed(inner, 0, double, down, at, outer, 0, width, count, inner_width, width, 1)
        for member in range(count):
            share = shares_NK[members[first + member]]
            row = members[first + member] // per_token
            target = hidden[row * width : (row + 1) * width]
            source = outer[member * width : (member + 1) * width]
            for column in range(width):
                target[column] += share * source[column]
        first += count


@numba.njit(**BARE)
def _open_weights(addresses):
    """In the order of `PackedWeights.arrays`."""
    embedding, qkv, scale = (
        floats_at(addresses[0]),
        floats_at(addresses[2]),
        floats_at(addresses[3]),
    )
    output, gate, final_norm = (
        floats_at(addresses[4]),
        floats_at(addresses[5]),
        floats_at(addresses[9]),
    )
    experts = floats_at(addresses[6]), floats_at(addresses[7]), floats_at(addresses[8])
    return embedding, qkv, scale, output, gate, experts, final_norm


@numba.njit(**BARE)
def _open_buffers(addresses):
    """In the order of `NativeTrunk`'s."""
    rows = floats_at(addresses[0]), floats_at(addresses[1]), floats_at(addresses[2])
    logits_E = floats_at(addresses[6])
    attention = floats_at(addresses[3]), (floats_at(addresses[4]), floats_at(addresses[5]))
    chosen = integers_at(addresses[7]), floats_at(addresses[8])
    scratch = (
        floats_at(addresses[9]),
        floats_at(addresses[10]),
        floats_at(addresses[11]),
        floats_at(addresses[12]),
        integers_at(addresses[13]),
        integers_at(addresses[14]),
    )
    memory = floats_at(addresses[15]), floats_at(addresses[16]), floats_at(addresses[17])
    return rows, logits_E, attention, chosen, scratch, memory


@numba.njit(**BARE)
def run_trunk(weights, constants, buffers, tokens_N, positions_N, slots_N):
    """All layers for N rows. `weights` and `buffers` are addresses. See the module."""
    shape, sizes, epsilon, _, _ = constants
    embedding, qkv_w, qk_scale, output_w, gate_w, experts, final_norm = _open_weights(weights)
    arrays, logits_E, attention, chosen, scratch, memory = _open_buffers(buffers)
    (hidden, normal, qkv), (attended, scores), (keys, values, rotation) = arrays, attention, memory
    heads, groups, head_width, _, _ = shape
    width, _, padded_experts, _, layers, _ = sizes
    rows, qkv_width = len(tokens_N), (heads + 2 * groups) * head_width
    for row in range(rows):
        copy_floats(embedding, tokens_N[row] * width, hidden, row * width, width)
    for layer in range(layers):
        for row in range(rows):
            normalize_row(hidden, row * width, normal, row * width, width, epsilon)
        at = layer * width * qkv_width
        multiply_packed(normal, 0, width, qkv_w, at, qkv, 0, qkv_width, rows, width, qkv_width, 1)
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
        _remember(rows, shape, layer, qkv, slots_N, positions_N, keys, values)
        _attend(rows, shape, layer, qkv, slots_N, positions_N, keys, values, scores, attended)
        query_width = heads * head_width
        at = layer * query_width * width
        multiply_packed(
            attended, 0, query_width, output_w, at, hidden, 0, width, rows, query_width, width
        )
        for row in range(rows):
            normalize_row(hidden, row * width, normal, row * width, width, epsilon)
        at, padded = layer * width * padded_experts, padded_experts
        multiply_packed(normal, 0, width, gate_w, at, logits_E, 0, padded, rows, width, padded, 1)
        _mix_experts(rows, sizes, layer, normal, logits_E, experts, hidden, chosen, scratch)
    for row in range(rows):
        normalize_row(hidden, row * width, hidden, row * width, width, epsilon)
        final = hidden[row * width : (row + 1) * width]
        for column in range(width):
            final[column] *= final_norm[column]


@numba.njit(**BARE)
def run_head(weights, constants, buffers, rows_R):
    """Gathers the hidden states of some rows and computes their logits."""
    _, sizes, _, _, step = constants
    head, hidden, width, rows = floats_at(weights[1]), floats_at(buffers[0]), sizes[0], len(rows_R)
    chosen, logits = floats_at(buffers[18]), floats_at(buffers[19])
    for index in range(rows):
        copy_floats(hidden, rows_R[index] * width, chosen, index * width, width)
    multiply_packed(chosen, 0, width, head, 0, logits, 0, step, rows, width, step, 1)


class NativeTrunk:
    """Compiled forward pass, with the scratch memory of one engine."""

    def __init__(self, spec: ModelSpec, rotation_C1d: Tensor, cache: SlotCache, rows: int) -> None:
        check_native(spec)
        heads, groups, head_width = spec.num_attention_heads, spec.num_query_groups, spec.head_dim
        positions, slots = cache.positions, cache.keys_LSGdC.shape[1]
        experts, width, inner = spec.num_experts, spec.hidden_size, spec.expert_hidden_size
        per_token, lines = spec.experts_per_token, max(_MOST_LINES, heads // groups)
        self._width, self._vocab = width, spec.vocab_size
        self._step = whole_vectors(spec.vocab_size)
        self._constants = (
            (heads, groups, head_width, positions, slots),
            (width, experts, whole_vectors(experts), inner, spec.num_layers, per_token),
            np.float32(spec.norm_epsilon),
            self._vocab,
            self._step,
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
            cache.keys_LSGdC.view(-1).numpy(),
            cache.values_LSGCd.view(-1).numpy(),
            torch.view_as_real(rotation_C1d).reshape(-1).numpy(),
            self._chosen,
            self._logits,
            self._raced_V,
        )
        self._buffers = _addresses(self._arrays)
        self._opened: tuple[PackedWeights, np.ndarray] | None = None
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # by rows: making them takes 4 us

    def forward(
        self,
        weights: DecodeWeights,
        tokens_N: np.ndarray,
        positions_N: np.ndarray,
        slots_N: np.ndarray,
    ) -> Tensor:
        """Feeds N rows. Returns routes [N, L, K]."""
        run_trunk(
            self._open(weights), self._constants, self._buffers, tokens_N, positions_N, slots_N
        )
        return torch.from_numpy(self._routes_NLK[: len(tokens_N)])

    def project(self, weights: DecodeWeights, rows_R: np.ndarray) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [R, D] and logits [R, V] of some rows just fed. Views
        that the next call overwrites.
        """
        self._make_room(len(rows_R))
        run_head(self._open(weights), self._constants, self._buffers, rows_R)
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
        """Feeds `width` rows per slot and samples after them, `forward`, `project` and `sample` in one
        call. Returns (tokens [R], log-probabilities [R], whether a row is limited by top-k or
        top-p). `table` is what `native_step` names so. Behind a slot's first sample that differs
        from the draft fed after it nothing is drawn: zeros stand there.
        """
        from ostinato.models.decode.compiled.step import run_decode_step  # noqa: PLC0415 - imports this module

        rows = len(slots_B) * width
        self._make_room(rows)
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

    def last_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """Hidden states [R, D] and logits [R, V] of the last call, as views it overwrites next."""
        if rows not in self._views:
            hidden = torch.from_numpy(self._chosen[: rows * self._width])
            self._views[rows] = hidden.view(rows, self._width), self._logits_view(rows)
        return self._views[rows]

    def draft(
        self, weights: DecodeWeights, depth: int, hidden_BD: np.ndarray, tokens_B: np.ndarray
    ) -> Tensor:
        """Logits after `tokens_B` by one draft layer. `hidden_BD` becomes the next depth's."""
        self._make_room(len(tokens_B))
        packed = _packed(weights)
        run_draft(
            packed.drafts[depth].arrays(),
            packed.embedding_VD,
            packed.head,
            self._width,
            self._step,
            self._constants[2],
            tokens_B,
            hidden_BD.reshape(-1),
            (self._normal, self._chosen, self._draft_inner, self._logits),
        )
        return self._logits_view(len(tokens_B))

    def _make_room(self, rows: int) -> None:
        if len(self._logits) < rows * self._step:
            self._logits = aligned_floats(rows * self._step)
            self._buffers[_LOGITS] = self._logits.ctypes.data
            self._views.clear()

    def _open(self, weights: DecodeWeights) -> np.ndarray:
        """Addresses of the packed weights, which are held as long as they are remembered."""
        packed = _packed(weights)
        if self._opened is None or self._opened[0] is not packed:
            self._opened = packed, _addresses(packed.arrays())
        return self._opened[1]

    def _logits_view(self, rows: int) -> Tensor:
        logits = torch.from_numpy(self._logits[: rows * self._step]).view(rows, self._step)
        return logits[:, : self._vocab]


def _packed(weights: DecodeWeights) -> PackedWeights:
    if weights.packed is None:
        raise ValueError(f"weights version {weights.version} were prepared without native=True")
    return weights.packed


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)

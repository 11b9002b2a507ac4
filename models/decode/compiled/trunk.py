"""One decode step of the whole trunk as one compiled function, in float32 on the CPU.

Eager torch would run some 170 operations. Matrices may be stored as bf16. Scales of norms are
folded into them or kept apart. `run_decode_step` also samples, which saves the Python calls between
the operations of a step without prompts.

Shapes: N rows, L layers, S slots, G key/value heads, H query heads, R query heads per group, d head
width, C positions, D model width, E experts, K experts per token, F expert width, V vocabulary, B
decoding slots, m rows per slot (in `run_decode_step` R = N = B * m rows).
"""

import numba
import numpy as np

from ostinato.models.decode.compiled.kernels import (
    attend_rows,
    choose_experts,
    copy_column,
    copy_floats,
    gate_row,
    multiply_packed,
    normalize_row,
    rotate_heads,
    scale_row,
)
from ostinato.models.decode.compiled.sampling import race_drafts
from ostinato.models.decode.compiled.vectors import BARE, JIT, floats_at, integers_at, items_at

MAX_LINES = 16  # query heads of one group, over rows, that attend together


@numba.njit(**BARE)
def _store_keys_values(rows, shape, layer, qkv, slots_N, positions_N, keys, values):
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
    most = max(1, MAX_LINES // per_group)
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
def _route(rows, sizes, routing, layer, logits_E, bias, chosen, scratch):
    """Chooses each row's experts. Fills `members` with row * K + rank of every choice, grouped by
    expert and ascending, and `ends_E` with each expert's end in that list.
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
            routing,
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
def _mix_experts(rows, sizes, routing, layer, normal, logits_E, experts, hidden, chosen, scratch):
    """Adds the chosen experts' outputs to `hidden`: rows of one expert are multiplied together."""
    width, num_experts, _, inner_width, _, per_token = sizes
    bias, up, down = experts
    _, shares_NK = chosen
    gathered, inner, outer, _, ends_E, members = scratch
    double = 2 * inner_width
    _route(rows, sizes, routing, layer, logits_E, bias, chosen, scratch)
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
def _open_weights(addresses, like):
    """Arrays at addresses in the order of `TrunkArrays`. `like`: an array of the matrices' dtype."""
    scale, gate, final_norm = (
        floats_at(addresses[3]),
        floats_at(addresses[5]),
        floats_at(addresses[9]),
    )
    qkv = items_at(addresses[2], like), floats_at(addresses[10])
    output = items_at(addresses[4], like)
    experts = (
        floats_at(addresses[6]),
        items_at(addresses[7], like),
        items_at(addresses[8], like),
    )
    return qkv, scale, output, gate, experts, final_norm


@numba.njit(**BARE)
def _open_buffers(addresses):
    """Arrays at addresses in the order of the buffers of `NativeTrunk`."""
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
def _normalize(rows, hidden, normal, width, epsilon, norms, norm):
    """RMSNorm of all rows, scaled where norms are not folded into the matrices."""
    for row in range(rows):
        normalize_row(hidden, row * width, normal, row * width, width, epsilon)
        if len(norms):
            scale_row(
                normal[row * width : (row + 1) * width], norms[norm * width : (norm + 1) * width]
            )


@numba.njit(**BARE)
def run_trunk(weights, constants, buffers, tokens_N, positions_N, slots_N):
    """All layers for N rows. `weights` as `NativeTrunk` opens them, `buffers` are addresses."""
    shape, sizes, epsilon, _, step, (has_norm, has_bias), routing = constants
    addresses, embedding, norms = weights
    (qkv_w, qkv_bias), qk_scale, output_w, gate_w, experts, final_norm = _open_weights(
        addresses, embedding
    )
    arrays, logits_E, attention, chosen, scratch, memory = _open_buffers(buffers)
    (hidden, normal, qkv), (attended, scores), (keys, values, rotation) = arrays, attention, memory
    heads, groups, head_width, _, _ = shape
    width, _, padded_experts, _, layers, _ = sizes
    rows, qkv_width = len(tokens_N), (heads + 2 * groups) * head_width
    for row in range(rows):
        copy_column(embedding, tokens_N[row], width, step, hidden, row * width)
    for layer in range(layers):
        _normalize(rows, hidden, normal, width, epsilon, norms, 2 * layer)
        at = layer * width * qkv_width
        if has_bias:
            for row in range(rows):
                copy_floats(qkv_bias, layer * qkv_width, qkv, row * qkv_width, qkv_width)
        is_new = 0 if has_bias else 1
        multiply_packed(
            normal, 0, width, qkv_w, at, qkv, 0, qkv_width, rows, width, qkv_width, is_new
        )
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
                has_norm,
            )
        _store_keys_values(rows, shape, layer, qkv, slots_N, positions_N, keys, values)
        _attend(rows, shape, layer, qkv, slots_N, positions_N, keys, values, scores, attended)
        query_width = heads * head_width
        at = layer * query_width * width
        multiply_packed(
            attended, 0, query_width, output_w, at, hidden, 0, width, rows, query_width, width
        )
        _normalize(rows, hidden, normal, width, epsilon, norms, 2 * layer + 1)
        at, padded = layer * width * padded_experts, padded_experts
        multiply_packed(normal, 0, width, gate_w, at, logits_E, 0, padded, rows, width, padded, 1)
        _mix_experts(
            rows, sizes, routing, layer, normal, logits_E, experts, hidden, chosen, scratch
        )
    for row in range(rows):
        normalize_row(hidden, row * width, hidden, row * width, width, epsilon)
        scale_row(hidden[row * width : (row + 1) * width], final_norm[:width])


@numba.njit(**BARE)
def run_head(weights, constants, buffers, rows_R):
    """Gathers the hidden states of some rows and computes their logits."""
    _, sizes, _, _, step, _, _ = constants
    addresses, embedding, _ = weights
    head, hidden = items_at(addresses[1], embedding), floats_at(buffers[0])
    width, rows = sizes[0], len(rows_R)
    chosen, logits = floats_at(buffers[18]), floats_at(buffers[19])
    for index in range(rows):
        copy_floats(hidden, rows_R[index] * width, chosen, index * width, width)
    multiply_packed(chosen, 0, width, head, 0, logits, 0, step, rows, width, step, 1)


@numba.njit(**JIT)
def run_decode_step(
    weights,
    constants,
    buffers,
    table,
    slots_B,
    width,
    first_free_S,
    routes_SCLK,
    tokens_R,
    logprobs_R,
):
    """Feeds all rows and samples after each, up to a slot's first sample that differs from the
    draft fed next. Routes are stored from each slot's `first_free_S` on. Returns whether a row is
    limited by top-k or top-p: the caller must sample such a row again from its logits.
    """
    _, sizes, _, vocab, step, _, _ = constants
    tokens_SC, cached_S, context_S, seed_keys_S, temperature_S, top_p_S, top_k_S = table
    logits, raced_V = floats_at(buffers[19]), floats_at(buffers[20])
    rows = len(slots_B) * width
    slots_N, positions_N = np.empty(rows, np.int64), np.empty(rows, np.int64)
    fed_N, places_R = np.empty(rows, np.int64), np.empty(rows, np.int64)
    seed_keys_R, temperature_R = np.empty(rows, np.uint64), np.empty(rows, np.float32)
    is_limited = False
    for index in range(len(slots_B)):
        slot = slots_B[index]
        is_limited |= top_p_S[slot] < np.float32(1.0) or top_k_S[slot] > 0
        for ahead in range(width):
            row = index * width + ahead
            slots_N[row], positions_N[row] = slot, cached_S[slot] + ahead
            fed_N[row] = tokens_SC[slot, positions_N[row]]
            places_R[row] = context_S[slot] + ahead
            seed_keys_R[row], temperature_R[row] = seed_keys_S[slot], temperature_S[slot]
    run_trunk(weights, constants, buffers, fed_N, positions_N, slots_N)
    _store_routes(integers_at(buffers[7]), sizes, positions_N, slots_N, first_free_S, routes_SCLK)
    run_head(weights, constants, buffers, np.arange(rows))
    for first in range(0, rows, width):
        race_drafts(
            logits,
            step,
            vocab,
            first,
            fed_N[first : first + width],
            seed_keys_R,
            places_R,
            temperature_R,
            raced_V,
            tokens_R,
            logprobs_R,
        )
    return is_limited


@numba.njit(**JIT)
def _store_routes(routes_NLK, sizes, positions_N, slots_N, first_free_S, routes_SCLK):
    _, _, _, _, layers, per_token = sizes
    for row in range(len(slots_N)):
        if positions_N[row] >= first_free_S[slots_N[row]]:
            for layer in range(layers):
                for rank in range(per_token):
                    routes_SCLK[slots_N[row], positions_N[row], layer, rank] = routes_NLK[
                        (row * layers + layer) * per_token + rank
                    ]

"""One decode-only step as one compiled call, which saves the Python calls between its operations.

Shapes: S slots, C positions, B decoding slots, m rows per slot, R = N = B * m rows, L layers, K
experts per token.
"""

import numba
import numpy as np

from ostinato.models.decode.compiled.sampling import race_drafts
from ostinato.models.decode.compiled.trunk import run_head, run_trunk
from ostinato.models.decode.compiled.vectors import JIT, floats_at, integers_at


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

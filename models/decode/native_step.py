"""One decode-only step as one compiled call: rows of the slot table in, samples out.

Owns `run_decode_step`. Enters: the slot table's arrays, how many rows a slot. Leaves: a token and
its log-probability a row, logits and hidden states in the trunk's buffers; keys, values and routes
are written to the cache. What it spares is Python between the pieces, a fifth of a step of nano.

Shapes: S slots, C positions, B decoding slots, m rows a slot, R = N = B * m rows, L layers, K
experts a token.
"""

import numba
import numpy as np

from models.decode.native_sampling import race_rows
from models.decode.native_tiles import JIT
from models.decode.native_trunk import run_head, run_trunk


@numba.njit(**JIT)
def run_decode_step(
    weights,
    constants,
    memory,
    buffers,
    head_buffers,
    table,
    slots_B,
    width,
    first_free_S,
    routes_SCLK,
    tokens_R,
    logprobs_R,
):
    """Feeds and samples after every row. Routes are stored from each slot's `first_free_S` on.
    Returns whether a row is limited by top-k or top-p: its sample is to be drawn again from the
    logits.
    """
    shape, sizes, epsilon, vocab, step = constants
    tokens_SC, cached_S, context_S, seed_keys_S, temperature_S, top_p_S, top_k_S = table
    keys, values, rotation = memory
    chosen, logits, raced_V = head_buffers
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
    run_trunk(
        weights,
        shape,
        sizes,
        epsilon,
        fed_N,
        positions_N,
        slots_N,
        (keys, values),
        rotation,
        buffers,
    )
    routes_NLK = buffers[6]
    for row in range(rows):
        if positions_N[row] >= first_free_S[slots_N[row]]:
            for layer in range(routes_NLK.shape[1]):
                for rank in range(routes_NLK.shape[2]):
                    routes_SCLK[slots_N[row], positions_N[row], layer, rank] = routes_NLK[
                        row, layer, rank
                    ]
    run_head(weights[1], buffers[0], np.arange(rows), sizes[0], step, chosen, logits)
    race_rows(
        logits, step, vocab, seed_keys_R, places_R, temperature_R, raced_V, tokens_R, logprobs_R
    )
    return is_limited

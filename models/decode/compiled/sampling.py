"""Sampling and drafting as compiled loops.

`race_rows` draws one token per row by the exponential race of models/decode/sampling.py with the
same noise of (seed, position, token), `race_drafts` stops where a draft fails, and `run_draft`
computes one draft layer. Rows limited by top-k or top-p are sampled by sampling.py.

Shapes: R rows, m rows of a slot, V vocabulary, B slots, D model width, M draft width.
"""

import numba
import numpy as np

from ostinato.models.decode.compiled.kernels import (
    copy_column,
    copy_floats,
    exponential,
    gate_row,
    multiply_packed,
    normalize_row,
    scale_row,
)
from ostinato.models.decode.compiled.vectors import (
    BARE,
    address_of,
    bits_of_float,
    float_of_bits,
    largest_of,
    mass_at,
)
from ostinato.models.decode.sampling import (
    GOLDEN_32,
    GOLDEN_64,
    MIX_32_A,
    MIX_32_B,
    MIX_64_A,
    MIX_64_B,
    UNIT_23,
)

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@numba.njit(**BARE)
def _logarithm(x):
    """Natural logarithm of a number in (0, 1), to float32 rounding."""
    bits = bits_of_float(x)
    power = np.float32((bits >> np.int32(23)) - np.int32(126))
    # in [0.5, 1)
    part = float_of_bits(np.int32((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)))
    is_small = part < np.float32(0.707106781186547524)
    power = power - _ONE if is_small else power
    part = part + part - _ONE if is_small else part - _ONE
    square = part * part
    series = np.float32(7.0376836292e-2)
    series = series * part - np.float32(1.1514610310e-1)
    series = series * part + np.float32(1.1676998740e-1)
    series = series * part - np.float32(1.2420140846e-1)
    series = series * part + np.float32(1.4249322787e-1)
    series = series * part - np.float32(1.6668057665e-1)
    series = series * part + np.float32(2.0000714765e-1)
    series = series * part - np.float32(2.4999993993e-1)
    series = series * part + np.float32(3.3333331174e-1)
    series = series * part * square
    series = series - np.float32(2.12194440e-4) * power - _HALF * square
    return part + series + np.float32(0.693359375) * power


@numba.njit(**BARE)
def _mix_64(value):
    value = (value ^ (value >> np.uint64(30))) * MIX_64_A
    value = (value ^ (value >> np.uint64(27))) * MIX_64_B
    return value ^ (value >> np.uint64(31))


@numba.njit(**BARE)
def _token_noise(low, high, token):
    """Exponential noise of one token. `low` and `high` are the halves of the position's key."""
    bits = np.uint32(np.uint32(token) * GOLDEN_32 + low)
    bits = np.uint32((bits ^ np.uint32(bits >> np.uint32(16))) * MIX_32_A)
    bits = np.uint32(bits + high)
    bits = np.uint32((bits ^ np.uint32(bits >> np.uint32(13))) * MIX_32_B)
    unit = (np.float32(np.int32(bits >> np.uint32(9))) + _HALF) * UNIT_23
    return -_logarithm(unit)


@numba.njit(**BARE)
def _race(scores, seed_key, place, temperature, raced_V):
    """One token and its log-probability. Greedy if the temperature is 0."""
    vocab = len(scores)
    is_greedy = temperature == _ZERO
    divisor = _ONE if is_greedy else temperature
    largest = largest_of(scores)
    for token in range(vocab):
        raced_V[token] = exponential((scores[token] - largest) / divisor)
    total = mass_at(address_of(raced_V, 0), vocab)
    if not is_greedy:
        key = _mix_64(seed_key + np.uint64(place) * GOLDEN_64)
        low, high = np.uint32(key), np.uint32(key >> np.uint64(32))
        for token in range(vocab):
            raced_V[token] = raced_V[token] / _token_noise(low, high, token)
    best_value = largest_of(raced_V[:vocab])
    best = 0
    while raced_V[best] < best_value:
        best += 1
    return best, (scores[best] - largest) / divisor - np.log(total)


@numba.njit(**BARE)
def race_rows(
    logits, step, vocab, seed_keys_R, positions_R, temperature_R, raced_V, tokens_R, logprobs_R
):
    """One token per row and its log-probability."""
    for row in range(len(tokens_R)):
        tokens_R[row], logprobs_R[row] = _race(
            logits[row * step : row * step + vocab],
            seed_keys_R[row],
            positions_R[row],
            temperature_R[row],
            raced_V,
        )


@numba.njit(**BARE)
def race_drafts(
    logits,
    step,
    vocab,
    first,
    fed_m,
    seed_keys_R,
    positions_R,
    temperature_R,
    raced_V,
    tokens_R,
    logprobs_R,
):
    """Like `race_rows`, for a slot's rows from `first` on, until a sample differs from the draft
    that was fed next. Later rows keep their values. `fed_m`: the last token and the drafts. Returns
    the number of rows drawn.
    """
    drawn = 0
    while drawn < len(fed_m):
        row = first + drawn
        tokens_R[row], logprobs_R[row] = _race(
            logits[row * step : row * step + vocab],
            seed_keys_R[row],
            positions_R[row],
            temperature_R[row],
            raced_V,
        )
        drawn += 1
        if drawn < len(fed_m) and tokens_R[row] != fed_m[drawn]:
            break
    return drawn


@numba.njit(**BARE)
def run_draft(draft, embedding, head, width, vocab, epsilon, tokens_B, hidden, buffers):
    """Logits of one draft layer after `tokens_B`. Overwrites `hidden` for the next depth."""
    hidden_in, embed_in, gate_up, down, norm_D, norms = draft
    normal, mixed, inner, logits = buffers
    rows, inner_width = len(tokens_B), len(down) // width
    for row in range(rows):
        normalize_row(hidden, row * width, normal, row * width, width, epsilon)
        if len(norms):
            scale_row(normal[row * width : (row + 1) * width], norms[:width])
    multiply_packed(normal, 0, width, hidden_in, 0, mixed, 0, width, rows, width, width, 1)
    for row in range(rows):
        copy_column(embedding, tokens_B[row], width, vocab, normal, row * width)
        normalize_row(normal, row * width, normal, row * width, width, epsilon)
        if len(norms):
            scale_row(normal[row * width : (row + 1) * width], norms[width : 2 * width])
    multiply_packed(normal, 0, width, embed_in, 0, mixed, 0, width, rows, width, width)
    for row in range(rows):
        normalize_row(mixed, row * width, normal, row * width, width, epsilon)
        if len(norms):
            scale_row(normal[row * width : (row + 1) * width], norms[2 * width :])
    double = 2 * inner_width
    multiply_packed(normal, 0, width, gate_up, 0, inner, 0, double, rows, width, double, 1)
    for row in range(rows):
        gate_row(inner, row * double, inner_width)
    multiply_packed(inner, 0, double, down, 0, mixed, 0, width, rows, inner_width, width)
    for row in range(rows):
        normalize_row(mixed, row * width, normal, row * width, width, epsilon)
        scale_row(normal[row * width : (row + 1) * width], norm_D)
        copy_floats(mixed, row * width, hidden, row * width, width)
    multiply_packed(normal, 0, width, head, 0, logits, 0, vocab, rows, width, vocab, 1)

"""The pieces of a decode step as compiled loops over flat float32 arrays.

Owns products with packed matrices, RMSNorm, rotation, attention of one row, choice of experts. The
formulae are those of models/decode/forward.py; only the order of roundings differs. A row's numbers
depend on its slot's history only, bit for bit, whatever else is in the batch. Arrays are flat, with
the offset of what is meant; a packed matrix is panels of 64 columns (the last one narrower), each
panel row after row.

Shapes: N rows, K depth or experts a token, O columns, H query and key heads, d head width, E
experts, C positions.
"""

import numba
import numpy as np

from models.decode.native_tiles import JIT, accumulate, float_of_bits
from models.decode.packed import PANEL

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LIMIT = np.float32(87.0)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)


@numba.njit(**JIT)
def multiply_packed(x, x_at, x_step, w, w_at, y, y_at, y_step, rows, depth, columns):
    """y[N, O] += x[N, K] @ w[K, O]; w is packed and begins at `w_at`."""
    for first in range(0, columns, PANEL):
        width = min(PANEL, columns - first)
        panel_at = w_at + first * depth
        accumulate(x, x_at, x_step, w, panel_at, width, y, y_at + first, y_step, rows, depth, width)


@numba.njit(**JIT)
def exponential(x):
    """exp to float32 rounding, clipped at +-87; vectorises, which the C library's does not."""
    x = min(max(x, -_LIMIT), _LIMIT)
    power = np.floor(x * _LOG2_E + _HALF)
    x = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * x + np.float32(1.3981999507e-3)
    series = series * x + np.float32(8.3334519073e-3)
    series = series * x + np.float32(4.1665795894e-2)
    series = series * x + np.float32(1.6666665459e-1)
    series = series * x + np.float32(5.0000001201e-1)
    series = series * x * x + x + _ONE
    return series * float_of_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))


@numba.njit(**JIT)
def normalize_row(x, x_at, y, y_at, width, epsilon):
    """y = RMSNorm of x without its scale."""
    source, target = x[x_at : x_at + width], y[y_at : y_at + width]
    total = _ZERO
    for place in range(width):
        total += source[place] * source[place]
    factor = _ONE / np.sqrt(total / np.float32(width) + epsilon)
    for place in range(width):
        target[place] = source[place] * factor


@numba.njit(**JIT)
def gate_row(inner, at, width):
    """inner[:F] = silu(inner[:F]) * inner[F:2F] in place."""
    gates, ups = inner[at : at + width], inner[at + width : at + 2 * width]
    for place in range(width):
        gate = gates[place]
        gates[place] = gate / (_ONE + exponential(-gate)) * ups[place]


@numba.njit(**JIT)
def rotate_heads(qkv, at, heads, width, scale_Hd, scale_at, rotation_Cd, rotation_at, epsilon):
    """Norm, scale and rotation of a row's query and key heads, in place; pairs stand together."""
    for head in range(heads):
        first = at + head * width
        row = qkv[first : first + width]
        scale = scale_Hd[scale_at + head * width : scale_at + (head + 1) * width]
        rotation = rotation_Cd[rotation_at : rotation_at + width]
        normalize_row(qkv, first, qkv, first, width, epsilon)
        for pair in range(width // 2):
            left, right = 2 * pair, 2 * pair + 1
            even, odd = row[left] * scale[left], row[right] * scale[right]
            row[left] = even * rotation[left] - odd * rotation[right]
            row[right] = even * rotation[right] + odd * rotation[left]


@numba.njit(**JIT)
def largest_of(values):
    """The largest of a slice."""
    largest = values[0]
    for at in range(len(values)):
        value = values[at]
        largest = value if value > largest else largest
    return largest


@numba.njit(**JIT)
def soften(scores):
    """Softmax of a slice in place. Loops begin at 0: an index that might be negative would keep
    them from becoming vectors.
    """
    largest = largest_of(scores)
    total = _ZERO
    for at in range(len(scores)):
        grown = exponential(scores[at] - largest)
        scores[at] = grown
        total += grown
    factor = _ONE / total
    for at in range(len(scores)):
        scores[at] *= factor


@numba.njit(**JIT)
def attend_row(
    query, q_at, keys, k_at, values, v_at, heads, width, positions, length, scores, out, out_at
):
    """Attention of one row's heads of one group over `length` of C positions."""
    padded = (length + 15) // 16 * 16
    for head in range(heads):
        scores[head * positions : head * positions + padded] = _ZERO
    accumulate(
        query, q_at, width, keys, k_at, positions, scores, 0, positions, heads, width, padded
    )
    for head in range(heads):
        soften(scores[head * positions : head * positions + length])
    out[out_at : out_at + heads * width] = _ZERO
    accumulate(scores, 0, positions, values, v_at, width, out, out_at, width, heads, length, width)


@numba.njit(**JIT)
def choose_experts(logits, at, bias_E, bias_at, num_experts, scratch_E, experts_K, shares_K):
    """The K experts of a row by biased sigmoid score, likeliest first, and their shares by score."""
    for expert in range(num_experts):
        score = _ONE / (_ONE + exponential(-logits[at + expert]))
        logits[at + expert] = score
        scratch_E[expert] = score + bias_E[bias_at + expert]
    mass = _ZERO
    for rank in range(len(shares_K)):
        best = 0
        for expert in range(1, num_experts):
            if scratch_E[expert] > scratch_E[best]:
                best = expert
        scratch_E[best] = np.float32(-np.inf)
        experts_K[rank] = best
        shares_K[rank] = logits[at + best]
        mass += shares_K[rank]
    for rank in range(len(shares_K)):
        shares_K[rank] /= mass

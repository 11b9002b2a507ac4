"""Operations of a decode step as compiled loops over flat float32 arrays; matrices may be bf16.

Products with packed matrices, RMSNorm, rotation, attention of neighbouring rows, choice of experts.
The formulae are those of models/network; only the order of roundings differs. A row's numbers
depend on its slot's history only, bit for bit, whatever else is in the batch. A flat array comes
with the offset at which to begin. A packed matrix is panels of 64 columns (the last one narrower),
each panel row after row.

Shapes: N rows, K depth or experts per token, O columns, H query and key heads, d head width, E
experts, C positions.
"""

import numba
import numpy as np

from ostinato.models.decode.compiled.packed import PANEL
from ostinato.models.decode.compiled.tiles import accumulate
from ostinato.models.decode.compiled.vectors import (
    BARE,
    address_of,
    as_float,
    float_of_bits,
    largest_of,
    pointer_at,
    rotate_pairs,
    squares_at,
    sum_at,
)

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LIMIT = np.float32(87.0)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_NEW = np.int64(1)


@numba.njit(**BARE)
def multiply_packed(x, x_at, x_step, w, w_at, y, y_at, y_step, rows, depth, columns, is_new=0):
    """y[N, O] += x[N, K] @ w[K, O]. W is packed and begins at `w_at`. `is_new`: y is overwritten."""
    source, target = address_of(x, x_at), address_of(y, y_at)
    for first in range(0, columns, PANEL):
        width = min(PANEL, columns - first)
        panel, result = pointer_at(w, w_at + first * depth), target + 4 * first
        # An int64, since numba would type each literal separately and compile all tiles anew.
        begins = np.int64(is_new)
        accumulate(source, x_step, panel, width, result, y_step, rows, depth, width, begins)


@numba.njit(**BARE)
def exponential(x):
    """exp to float32 rounding, clipped at +-87. Unlike the C library's, it vectorises."""
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


@numba.njit(**BARE)
def norm_divisor(x, x_at, width, epsilon):
    """Divisor of a row in RMSNorm."""
    return np.sqrt(squares_at(address_of(x, x_at), width) / np.float32(width) + epsilon)


@numba.njit(**BARE)
def normalize_row(x, x_at, y, y_at, width, epsilon):
    """y = RMSNorm of x without its scale."""
    source, target = x[x_at : x_at + width], y[y_at : y_at + width]
    divisor = norm_divisor(x, x_at, width, epsilon)
    for place in range(width):
        target[place] = source[place] / divisor


@numba.njit(**BARE)
def scale_row(row, scale):
    """row *= scale, for a norm whose scale is not folded into the next matrix."""
    for place in range(len(row)):
        row[place] *= scale[place]


@numba.njit(**BARE)
def gate_row(inner, at, width):
    """inner[:F] = silu(inner[:F]) * inner[F:2F] in place."""
    gates, ups = inner[at : at + width], inner[at + width : at + 2 * width]
    for place in range(width):
        gate = gates[place]
        gates[place] = gate / (_ONE + exponential(-gate)) * ups[place]


@numba.njit(**BARE)
def rotate_heads(
    qkv, at, heads, width, scale_Hd, scale_at, rotation_Cd, rotation_at, epsilon, has_norm
):
    """Norm (or none), scale and rotation of a row's query and key heads, in place. Elements of a
    rotated pair are adjacent.
    """
    scale, rotation = address_of(scale_Hd, scale_at), address_of(rotation_Cd, rotation_at)
    for head in range(heads):
        first = at + head * width
        divisor = norm_divisor(qkv, first, width, epsilon) if has_norm else np.float32(1.0)
        rotate_pairs(address_of(qkv, first), divisor, scale + 4 * head * width, rotation, width)


@numba.njit(**BARE)
def softmax_in_place(scores):
    """Softmax of a slice in place. Loops begin at 0, or LLVM would not vectorise them."""
    largest = largest_of(scores)
    for at in range(len(scores)):
        scores[at] = exponential(scores[at] - largest)
    total = sum_at(address_of(scores, 0), len(scores))
    for at in range(len(scores)):
        scores[at] = scores[at] / total


@numba.njit(**BARE)
def attend_rows(
    query,
    q_at,
    q_step,
    keys,
    values,
    memory,
    rows,
    heads,
    width,
    positions,
    length,
    buffers,
    out,
    out_at,
    out_step,
):
    """Attention of the heads of one group at consecutive positions of one slot: the first row sees
    `length` of C positions, each further row one more. Keys and values are read once for all rows;
    positions after a row's own get weight 0.
    """
    gathered, scores = buffers
    most = length + rows - 1
    lines = rows * heads
    source, step = address_of(query, q_at), width
    if rows > 1:
        source, step = address_of(gathered, 0), width
        for row in range(rows):
            copy_floats(query, q_at + row * q_step, gathered, row * heads * width, heads * width)
    padded = (most + 15) // 16 * 16
    weights = address_of(scores, 0)
    accumulate(
        source,
        step,
        pointer_at(keys, memory),
        positions,
        weights,
        positions,
        lines,
        width,
        padded,
        _NEW,
    )
    for line in range(lines):
        own = length + line // heads
        first = line * positions
        softmax_in_place(scores[first : first + own])
        for place in range(most - own):
            scores[first + own + place] = _ZERO
    result = address_of(out, out_at)
    if rows > 1:
        result = address_of(gathered, 0)
    accumulate(
        weights,
        positions,
        pointer_at(values, memory),
        width,
        result,
        width,
        lines,
        most,
        width,
        _NEW,
    )
    if rows > 1:
        for row in range(rows):
            copy_floats(gathered, row * heads * width, out, out_at + row * out_step, heads * width)


@numba.njit(**BARE)
def copy_floats(x, x_at, y, y_at, count):
    """y = x. x may be bf16."""
    source, target = x[x_at : x_at + count], y[y_at : y_at + count]
    for place in range(count):
        target[place] = as_float(source[place])


@numba.njit(**BARE)
def copy_column(packed, column, depth, columns, y, y_at):
    """y = a column of a packed matrix [depth, columns], which may be bf16."""
    first = column // PANEL * PANEL
    panel_width = min(PANEL, columns - first)
    place = first * depth + column - first
    target = y[y_at : y_at + depth]
    for row in range(depth):
        target[row] = as_float(packed[place])
        place += panel_width


@numba.njit(**BARE)
def choose_experts(
    logits, at, bias_E, bias_at, num_experts, routing, scratch_E, experts_K, shares_K
):
    """Chooses a row's K experts by biased score, highest first. Their shares come from the unbiased
    scores. `routing`: whether scores are a softmax (else sigmoids), whether the shares sum to 1,
    and their factor.
    """
    is_softmax, normalizes, scale = routing
    if is_softmax:
        softmax_in_place(logits[at : at + num_experts])
    else:
        for expert in range(num_experts):
            logits[at + expert] = _ONE / (_ONE + exponential(-logits[at + expert]))
    for expert in range(num_experts):
        scratch_E[expert] = logits[at + expert] + bias_E[bias_at + expert]
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
    divisor = mass if normalizes else _ONE
    for rank in range(len(shares_K)):
        shares_K[rank] = shares_K[rank] / divisor * scale

"""Rounding to MXFP8 and back as one compiled loop over fp32 numbers.

Plain torch needs twenty passes over memory for it. This module is imported on first use, since
numba takes a second to load.

Shapes: L matrices, M rows, K columns.
"""

import numba
import numpy as np

from ostinato.kernels.mxfp8.formats import (
    FP8_MAX,
    FP8_MAX_EXPONENT,
    RCEIL_MANTISSA_LIMIT,
    SCALE_BIAS,
    SUBNORMAL_POWER,
)

_MAX = np.float32(FP8_MAX)
_SIGN = np.int32(-(2**31))
_MAGNITUDE = np.int32(2**31 - 1)
_MANTISSA = np.int32(2**23 - 1)
# e4m3 keeps 3 of fp32's 23 bits; below 2**-6 its steps are 2**-9, like those of fp32 at 1.5 * 2**14
_KEPT = np.int32(-(2**20))
_HALF_STEP = np.int32(2**19 - 1)
_SMALLEST_NORMAL = np.int32((SCALE_BIAS - 6) << 23)
_SUBNORMAL_STEPS = np.float32(1.5 * 2**14)


@numba.njit(cache=True, error_model="numpy")
def _scale_byte(bits):
    """RCEIL of a largest magnitude, given as the bits of the fp32 number. 255 if it is not finite."""
    exponent = bits >> 23
    if exponent == 255:
        return 255
    more = 1 if (bits & _MANTISSA) > RCEIL_MANTISSA_LIMIT else 0
    return max(0, exponent - FP8_MAX_EXPONENT + more)


@numba.njit(cache=True, error_model="numpy")
def _power(byte):
    """2**(byte - 127)."""
    return np.int32(byte << 23 if byte > 0 else SUBNORMAL_POWER).view(np.float32)


@numba.njit(cache=True, error_model="numpy")
def _rounded(value):
    """Nearest even e4m3 of a finite number, saturating, as fp32."""
    bits = np.float32(value).view(np.int32)
    magnitude = min(np.int32(bits & _MAGNITUDE).view(np.float32), _MAX)
    whole = np.float32(magnitude).view(np.int32)
    normal = np.int32((whole + _HALF_STEP + ((whole >> 20) & 1)) & _KEPT)
    small = np.float32((magnitude + _SUBNORMAL_STEPS) - _SUBNORMAL_STEPS).view(np.int32)
    chosen = small if whole < _SMALLEST_NORMAL else normal
    return np.int32(chosen | (bits & _SIGN)).view(np.float32)


@numba.njit(cache=True, error_model="numpy")
def _largest_of(bits_MK, first, last, block_columns, largest):
    """Largest magnitudes, as bits, of the blocks of rows first to last."""
    num_columns = bits_MK.shape[1]
    largest[:] = 0
    for row in range(first, last):
        if block_columns == 1:
            for column in range(num_columns):
                found = np.int32(bits_MK[row, column] & _MAGNITUDE)
                largest[column] = max(largest[column], found)
            continue
        for block in range(largest.size):
            found = largest[block]
            start = block * block_columns
            for column in range(start, min(start + block_columns, num_columns)):
                found = max(found, np.int32(bits_MK[row, column] & _MAGNITUDE))
            largest[block] = found


@numba.njit(cache=True, error_model="numpy")
def _round_row(row_K, down, up, block_columns, out_K):
    """Rounds one row with the factors of its blocks."""
    if block_columns == 1:
        for column in range(row_K.size):
            out_K[column] = _rounded(row_K[column] * down[column]) * up[column]
        return
    for block in range(down.size):
        by, back = down[block], up[block]
        start = block * block_columns
        for column in range(start, min(start + block_columns, row_K.size)):
            out_K[column] = _rounded(row_K[column] * by) * back


@numba.njit(cache=True, error_model="numpy")
def round_blocks(matrix_LMK, bits_LMK, block_rows, block_columns, out_LMK):
    """Fills `out_LMK`. `bits_LMK`: the memory of `matrix_LMK` as int32."""
    num_matrices, num_rows, num_columns = matrix_LMK.shape
    num_blocks = (num_columns + block_columns - 1) // block_columns
    largest = np.empty(num_blocks, np.int32)
    down = np.empty(num_blocks, np.float32)
    up = np.empty(num_blocks, np.float32)
    for matrix in range(num_matrices):
        for first in range(0, num_rows, block_rows):
            last = min(first + block_rows, num_rows)
            _largest_of(bits_LMK[matrix], first, last, block_columns, largest)
            for block in range(num_blocks):
                byte = _scale_byte(largest[block])
                down[block] = np.float32(np.nan) if byte == 255 else _power(254 - byte)
                up[block] = np.float32(np.nan) if byte == 255 else _power(byte)
            for row in range(first, last):
                _round_row(matrix_LMK[matrix, row], down, up, block_columns, out_LMK[matrix, row])

"""NVFP4 with one outer scale a token, forward only, in plain torch.

There is no kernel: no chip at hand multiplies it, and the backward pass is MXFP8's.

Values are e2m1 (0 .5 1 1.5 2 3 4 6) with an e4m3 scale a block of 16 and an fp32 scale a row. The
row, not the tensor, carries the outer scale: with one scale a tensor a token's numbers depend on
which others share its batch, and on tokens that come after it. Divisions are IEEE divisions: a
product with the reciprocal rounds twice and picks the neighbouring code for some inputs.

`linear_reference` sums exactly: a product of two values with their block scales is a multiple of
2**-20 below 2**23, so fp64 holds sums of up to 1024 of them without rounding, in any order. Longer
sums add such pieces first to last.

Shapes: M rows, N outputs, K columns, B blocks along K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
FP4_MAX = 6.0
FP8_MAX = 448.0
FP8 = torch.float8_e4m3fn
EXACT_TERMS = 1024
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor:
    """Rows in NVFP4: e2m1 values held as floats, their block scales, one outer scale a row."""

    values_MK: Tensor
    block_scales_MB: Tensor
    row_scales_M: Tensor


def round_to_fp4(values: Tensor) -> Tensor:
    """Nearest e2m1, ties to the even code, saturating at 6; returned in fp32."""
    magnitude = values.abs().clamp(max=FP4_MAX)
    # the grid is .5 below 2, 1 from 2 to 4, 2 above; torch.round breaks ties to even codes on each
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, values)


def quantize_reference(rows_MK: Tensor) -> Nvfp4Tensor:
    """Rounds each row by itself. K must be a multiple of 16; NaN and infinity stay NaN."""
    if rows_MK.shape[-1] % BLOCK:
        raise ValueError(f"rows have {rows_MK.shape[-1]} columns, wanted a multiple of {BLOCK}")
    wide_MK = rows_MK.float()
    row_scales_M = wide_MK.abs().amax(-1) / (FP4_MAX * FP8_MAX)
    # a row of zeros has no scale; 1 keeps its zeros
    row_scales_M = torch.where(row_scales_M == 0, 1.0, row_scales_M)
    blocks_MBT = wide_MK.unflatten(-1, (-1, BLOCK))
    wanted_MB = blocks_MBT.abs().amax(-1) / FP4_MAX / row_scales_M[:, None]
    block_scales_MB = wanted_MB.clamp(max=FP8_MAX).to(FP8)
    divisor_MB1 = (block_scales_MB.float() * row_scales_M[:, None])[..., None]
    # a block so small that its scale rounds to zero becomes zeros
    quotient_MBT = torch.where(divisor_MB1 == 0, 0.0, blocks_MBT / divisor_MB1)
    return Nvfp4Tensor(
        round_to_fp4(quotient_MBT).view(wide_MK.shape), block_scales_MB, row_scales_M
    )


def dequantize_reference(tensor: Nvfp4Tensor) -> Tensor:
    """Values times both scales, in fp32."""
    return _inner(tensor).float() * tensor.row_scales_M[:, None]


def linear_reference(rows: Nvfp4Tensor, weights: Nvfp4Tensor) -> Tensor:
    """Returns outputs_MN = rows @ weights.T; each depends on its own row of either alone."""
    left_MK, right_NK = _inner(rows), _inner(weights)
    total_MN = left_MK.new_zeros(left_MK.shape[0], right_NK.shape[0])
    for start in range(0, left_MK.shape[1], EXACT_TERMS):
        piece = slice(start, start + EXACT_TERMS)
        total_MN += left_MK[:, piece] @ right_NK[:, piece].T
    return (total_MN.float() * rows.row_scales_M[:, None]) * weights.row_scales_M


def _inner(tensor: Nvfp4Tensor) -> Tensor:
    scales_MK = tensor.block_scales_MB.double().repeat_interleave(BLOCK, -1)
    return tensor.values_MK.double() * scales_MK

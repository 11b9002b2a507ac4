"""MXFP8 rounding in plain torch, to check every other path against, bit by bit.

It defines `quantize` and `dequantize`: one scale byte per block from its largest magnitude (RCEIL, the
smallest power of two not below amax / 448, in integers), values divided by the scale, saturated and
rounded to nearest even. FLOOR (OCP's first recipe) would saturate a sixth of Gaussian blocks. A block
that holds NaN or infinity gets scale byte 255 and NaN values. Zeros keep their sign.

Shapes: M rows, K columns, padded to P x Q; S x T blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.mxfp8.formats import (
    FP8,
    FP8_MAX,
    FP8_MAX_EXPONENT,
    FP32_MANTISSA_BITS,
    RCEIL_MANTISSA_LIMIT,
    SCALE_NAN,
    Block,
    inverse_power_of_scale,
    power_of_scale,
)


def scale_bytes_reference(amax: Tensor) -> Tensor:
    """The scale byte of a block whose largest magnitude is `amax` (fp32, not negative)."""
    bits = amax.abs().contiguous().view(torch.int32)
    exponent = bits >> FP32_MANTISSA_BITS
    byte = exponent - FP8_MAX_EXPONENT + ((bits & 0x7FFFFF) > RCEIL_MANTISSA_LIMIT).int()
    byte = torch.where(exponent == 255, SCALE_NAN, byte.clamp(min=0))
    return byte.to(torch.uint8)


def expand_blocks(scales: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """Repeats each block's entry over the elements of the block."""
    full = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return full[..., : shape[-2], : shape[-1]]


def round_to_fp8(values: Tensor) -> Tensor:
    """Nearest even e4m3 of fp32 values, saturating. Every NaN becomes 0x7F."""
    rounded = values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return torch.where(values.isnan(), 0x7F, rounded.view(torch.uint8)).view(FP8)


def quantize_reference(matrix: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Returns the e4m3 values, shaped as `matrix`, and the scale bytes of its blocks."""
    rows, columns = matrix.shape[-2:]
    padded = functional.pad(matrix.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    scales = scale_bytes_reference(tiles.abs().amax(dim=(-3, -1)))
    inverse = expand_blocks(inverse_power_of_scale(scales), block, matrix.shape)
    return round_to_fp8(matrix.float() * inverse), scales


def dequantize_reference(
    values: Tensor, scales: Tensor, block: Block, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Values times their block's power of two: exact in fp32, in bf16 for bytes 3 to 246."""
    power = expand_blocks(power_of_scale(scales), block, values.shape)
    return (values.float() * power).to(dtype)

"""The MXFP8 format: e4m3 values that share a power-of-two scale per block.

A scale byte b means 2**(b - 127); 255 marks a block that held NaN or infinity. Blocks are (rows,
columns) of the last two dimensions: (1, 32) is the row copy of OCP MX, (32, 1) its column copy, and
(1, 128) and (128, 128) are the coarser layouts of Hopper's fast products. A tensor in coarse blocks is
also a valid MX tensor, with each byte repeated over the 32-blocks inside.

Shapes: M rows, K columns of a matrix; S and T scales along them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_MAX_EXPONENT = 8
SCALE_BIAS = 127
SCALE_NAN = 255
FP32_MANTISSA_BITS = 23
# 448 = 1.75 * 2**8: a mantissa above .75 needs one more power of two
RCEIL_MANTISSA_LIMIT = 0x600000
SUBNORMAL_POWER = (
    0x00400000  # 2**-127, the only power of two of the range that is subnormal in fp32
)

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MxTensor:
    """A matrix (or a stack of them) in MXFP8: values, one scale byte per block, and the block."""

    values: Tensor
    scales: Tensor
    block: Block

    def __post_init__(self) -> None:
        if self.values.dtype != FP8 or self.scales.dtype != torch.uint8:
            raise ValueError(
                f"values are {self.values.dtype} and scales {self.scales.dtype}, "
                f"wanted {FP8} and torch.uint8"
            )
        wanted = scale_shape(self.values.shape, self.block)
        if tuple(self.scales.shape) != wanted:
            raise ValueError(
                f"scales have shape {tuple(self.scales.shape)}, wanted {wanted} for values of "
                f"shape {tuple(self.values.shape)} in blocks of {self.block}"
            )

    def check_contracted_along_rows(self) -> None:
        """Refuses a copy whose scales change within a block of the contracted (last) dimension."""
        if self.block[1] == 1:
            raise ValueError(
                f"blocks of {self.block} have a scale for each contracted element, "
                "wanted blocks along the last dimension"
            )


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of values of `shape`. A last block may be smaller."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def power_of_scale(scales: Tensor) -> Tensor:
    """2**(byte - 127) in fp32, exactly. 255 gives NaN."""
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0, SUBNORMAL_POWER, exponent << FP32_MANTISSA_BITS)
    bits = torch.where(exponent == SCALE_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32)


def inverse_power_of_scale(scales: Tensor) -> Tensor:
    """2**(127 - byte) in fp32, exactly. 255 gives NaN."""
    exponent = 2 * SCALE_BIAS - scales.to(torch.int32)
    bits = torch.where(exponent == 0, SUBNORMAL_POWER, exponent << FP32_MANTISSA_BITS)
    bits = torch.where(exponent < 0, 0x7FC00000, bits)
    return bits.view(torch.float32)

"""Quantizing to MXFP8 and back.

These are the CPU paths; the Triton paths register themselves for CUDA (kernels/triton_backend.py).
All paths are bit-equal to `reference.py`.

Eager torch decodes e4m3 at 3.0 ns per element, so e4m3 is decoded through the bits of a half. A
training step on a CPU stores no bytes: `fake_quantize` directly returns the numbers that a product
would read, in one compiled loop (native_rounding.py).

Shapes: M rows, K columns.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.mxfp8.formats import Block, MxTensor, inverse_power_of_scale, power_of_scale
from ostinato.kernels.mxfp8.reference import expand_blocks, round_to_fp8, scale_bytes_reference
from ostinato.kernels.operation import Operation

HALF_OF_FP8 = 256.0  # e4m3 bits shifted into a half read 2**-8 of the value


def _block_maxima(matrix: Tensor, block: Block) -> Tensor:
    """Largest magnitude of each block. NaN if the block holds one."""
    rows, columns = matrix.shape[-2:]
    if columns % block[1] or rows % block[0]:
        matrix = functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    maxima = matrix.abs()
    if block[1] > 1:
        maxima = maxima.unflatten(-1, (-1, block[1])).amax(-1)
    if block[0] > 1:
        maxima = maxima.unflatten(-2, (-1, block[0])).amax(-2)
    return maxima


def _scaled(matrix: Tensor, factors: Tensor, block: Block) -> Tensor:
    """`matrix` times its blocks' factors, which are expanded only if blocks do not fit."""
    rows, columns = matrix.shape[-2:]
    if columns % block[1] or rows % block[0]:
        return matrix * expand_blocks(factors, block, matrix.shape)
    tiles = matrix.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    return (tiles * factors[..., :, None, :, None]).reshape(matrix.shape)


def decode_fp8(values: Tensor) -> Tensor:
    """e4m3 to fp32, exactly. 0x7F and 0xFF give NaN."""
    byte = values.view(torch.uint8).to(torch.int16)
    half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    # 0x7F would decode to 480, but it is e4m3's NaN
    half = torch.where((byte & 0x7F) == 0x7F, 0x7E00, half)
    return half.view(torch.float16).float() * HALF_OF_FP8


def _quantize_cpu(matrix: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    wide = matrix.float()
    scales = scale_bytes_reference(_block_maxima(wide, block))
    return round_to_fp8(_scaled(wide, inverse_power_of_scale(scales), block)), scales


@Operation
def quantize_op(matrix: Tensor, block_rows: int, block_columns: int) -> tuple[Tensor, Tensor]:
    """Values and scale bytes of the blocks. See `quantize`."""
    return _quantize_cpu(matrix, (block_rows, block_columns))


@Operation
def quantize_row_col_op(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row copy, and the row copy of the transpose. See `quantize_row_col`."""
    transposed = matrix.transpose(-1, -2).contiguous()
    return (
        *_quantize_cpu(matrix, (1, group)),
        *_quantize_cpu(transposed, (1, group)),
    )


@Operation
def dequantize_op(
    values: Tensor, scales: Tensor, block_rows: int, block_columns: int, dtype: torch.dtype
) -> Tensor:
    """Values times their block's power of two. See `dequantize`."""
    power = power_of_scale(scales)
    return _scaled(decode_fp8(values), power, (block_rows, block_columns)).to(dtype)


def quantize(matrix: Tensor, block: Block) -> MxTensor:
    """Rounds a matrix, or a stack of them, to e4m3 with one scale per block."""
    values, scales = quantize_op(matrix, *block)
    return MxTensor(values, scales, block)


def quantize_row_col(matrix: Tensor, group: int) -> tuple[MxTensor, MxTensor]:
    """The (1, group) copies of a matrix and of its transpose, read in one pass: the first is
    contracted along columns, the second along rows.
    """
    values, scales, values_t, scales_t = quantize_row_col_op(matrix, group)
    return MxTensor(values, scales, (1, group)), MxTensor(values_t, scales_t, (1, group))


def dequantize(tensor: MxTensor) -> Tensor:
    """The numbers that a quantized matrix represents, in bf16."""
    return dequantize_op(tensor.values, tensor.scales, *tensor.block, torch.bfloat16)


def transpose(tensor: MxTensor) -> MxTensor:
    """The transposed matrix, with bytes moved. Only square blocks keep their shape."""
    return MxTensor(
        tensor.values.transpose(-1, -2).contiguous(),
        tensor.scales.transpose(-1, -2).contiguous(),
        (tensor.block[1], tensor.block[0]),
    )


def fake_quantize(matrix: Tensor, block: Block, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dequantize(quantize(matrix, block), dtype)` on a CPU without storing bytes."""
    from ostinato.kernels.mxfp8.native_rounding import round_blocks  # noqa: PLC0415 - loads numba

    wide = matrix.float().contiguous()
    rounded = torch.empty_like(wide)
    stacked = (math.prod(wide.shape[:-2]), *wide.shape[-2:])
    numbers, bits = wide.view(stacked).detach().numpy(), wide.view(torch.int32).view(stacked)
    round_blocks(numbers, bits.numpy(), *block, rounded.view(stacked).numpy())
    return rounded.to(dtype)

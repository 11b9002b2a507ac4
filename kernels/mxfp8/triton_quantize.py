"""Quantizing to MXFP8 and back in Triton.

CUDA paths of `quantize`, `quantize_row_col` and `dequantize`, bit-equal to `reference.py`.
Importing it needs Triton, but no GPU.

All are bound by memory (3.03 bytes per element; 4.06 for both copies), so a program reads its tile
once. Block maxima are taken on the bits of the magnitudes: as integers they have the order of the
numbers, with NaN above all. The conversion instruction itself saturates and rounds to nearest even.
The column copy is stored transposed, since Hopper's fp8 products read both operands along the
contracted dimension.

Shapes: M rows, K columns; G elements of a block.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.mxfp8.formats import FP8, scale_shape
from ostinato.kernels.mxfp8.op import dequantize_op, quantize_op, quantize_row_col_op

# Fastest of those measured on an H100 with Triton 3.6, over 32768 x 7168 elements.
NUM_WARPS = 4
ROW_TILE = (8, 512)
NARROW_COLUMN_TILE = (32, 256)  # blocks of up to 32 rows
WIDE_COLUMN_TILE = (128, 64)
BOTH_TILE = {32: (32, 128), 128: (128, 128)}
# Triton 3.6 uses 142 registers for the big tile, which allows one program per multiprocessor, and
# its loads wait for its stores. With 128 registers two programs fit, without spills.
BOTH_OPTIONS = {32: {"num_warps": 4}, 128: {"num_warps": 8, "maxnreg": 128}}


@triton.jit
def scale_byte(amax_bits):
    """The scale byte (int32) of a block, from the bits of its largest fp32 magnitude."""
    exponent = amax_bits >> 23
    byte = exponent - 8 + ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(exponent == 255, 255, tl.maximum(byte, 0))


@triton.jit
def inverse_power(byte):
    """2**(127 - byte). NaN for 255."""
    bits = tl.where(byte == 254, 0x00400000, (254 - byte) << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def power(byte):
    """2**(byte - 127). NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quantize_tile(
    tile,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G_ROWS: tl.constexpr,
    G_COLUMNS: tl.constexpr,
):
    """Rounds a (ROWS, COLUMNS) fp32 tile in blocks. Returns e4m3 values and uint8 scales."""
    blocks = tl.reshape(tile, (ROWS // G_ROWS, G_ROWS, COLUMNS // G_COLUMNS, G_COLUMNS))
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    byte = scale_byte(tl.max(tl.max(bits, 3), 1))
    scaled = blocks * inverse_power(byte)[:, None, :, None]
    values = tl.reshape(scaled, (ROWS, COLUMNS)).to(tl.float8e4nv)
    return values, byte.to(tl.uint8)


@triton.jit
def store_tile(
    values,
    scales,
    out_ptr,
    scales_ptr,
    row,
    column,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G_ROWS: tl.constexpr,
    G_COLUMNS: tl.constexpr,
):
    """Stores a tile at (row, column) of a contiguous matrix, and its scales."""
    store_rows(out_ptr, values, row, num_rows, column, num_columns, num_columns, ROWS, COLUMNS)
    scale_columns = tl.cdiv(num_columns, G_COLUMNS)
    s_rows = row // G_ROWS + tl.arange(0, ROWS // G_ROWS)
    s_columns = column // G_COLUMNS + tl.arange(0, COLUMNS // G_COLUMNS)
    s_offsets = s_rows.to(tl.int64)[:, None] * scale_columns + s_columns[None, :]
    s_mask = (s_rows < tl.cdiv(num_rows, G_ROWS))[:, None] & (s_columns < scale_columns)[None, :]
    tl.store(scales_ptr + s_offsets, scales, mask=s_mask)


@triton.jit
def load_tile(
    matrix_ptr, row, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A tile of a contiguous matrix in fp32, zeros outside."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(matrix_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(
    out_ptr, tile, row, end, column, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Stores a tile in the result's type into rows of `stride` elements, up to row `end` and column
    `width`.
    """
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    out = out_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = (rows < end)[:, None] & (columns < width)[None, :]
    tl.store(out, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(
    matrix_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G_ROWS: tl.constexpr,
    G_COLUMNS: tl.constexpr,
):
    """One tile of one matrix of a stack: grid (column tiles, row tiles, matrices)."""
    column, row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    index = tl.program_id(2).to(tl.int64)
    start = index * num_rows * num_columns
    s_start = index * tl.cdiv(num_rows, G_ROWS) * tl.cdiv(num_columns, G_COLUMNS)
    tile = load_tile(matrix_ptr + start, row, column, num_rows, num_columns, ROWS, COLUMNS)
    values, scales = quantize_tile(tile, ROWS, COLUMNS, G_ROWS, G_COLUMNS)
    store_tile(
        values,
        scales,
        values_ptr + start,
        scales_ptr + s_start,
        row,
        column,
        num_rows,
        num_columns,
        ROWS,
        COLUMNS,
        G_ROWS,
        G_COLUMNS,
    )


@triton.jit
def quantize_row_col_kernel(
    matrix_ptr,
    values_ptr,
    scales_ptr,
    values_t_ptr,
    scales_t_ptr,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
):
    """One tile: its row copy, and the row copy of its transpose."""
    column, row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    tile = load_tile(matrix_ptr, row, column, num_rows, num_columns, ROWS, COLUMNS)
    values, scales = quantize_tile(tile, ROWS, COLUMNS, 1, G)
    store_tile(
        values,
        scales,
        values_ptr,
        scales_ptr,
        row,
        column,
        num_rows,
        num_columns,
        ROWS,
        COLUMNS,
        1,
        G,
    )
    values, scales = quantize_tile(tile, ROWS, COLUMNS, G, 1)
    store_tile(
        tl.trans(values),
        tl.trans(scales),
        values_t_ptr,
        scales_t_ptr,
        column,
        row,
        num_columns,
        num_rows,
        COLUMNS,
        ROWS,
        1,
        G,
    )


@triton.jit
def dequantize_kernel(
    values_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G_ROWS: tl.constexpr,
    G_COLUMNS: tl.constexpr,
):
    """One tile of one matrix of a stack: grid (column tiles, row tiles, matrices)."""
    column, row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    index = tl.program_id(2).to(tl.int64)
    start = index * num_rows * num_columns
    scale_columns = tl.cdiv(num_columns, G_COLUMNS)
    s_start = index * tl.cdiv(num_rows, G_ROWS) * scale_columns
    tile = load_tile(values_ptr + start, row, column, num_rows, num_columns, ROWS, COLUMNS)
    s_rows = row // G_ROWS + tl.arange(0, ROWS // G_ROWS)
    s_columns = column // G_COLUMNS + tl.arange(0, COLUMNS // G_COLUMNS)
    s_mask = (s_rows < tl.cdiv(num_rows, G_ROWS))[:, None] & (s_columns < scale_columns)[None, :]
    s_offsets = s_rows.to(tl.int64)[:, None] * scale_columns + s_columns[None, :]
    byte = tl.load(scales_ptr + s_start + s_offsets, mask=s_mask, other=0).to(tl.int32)
    blocks = tl.reshape(tile, (ROWS // G_ROWS, G_ROWS, COLUMNS // G_COLUMNS, G_COLUMNS))
    numbers = tl.reshape(blocks * power(byte)[:, None, :, None], (ROWS, COLUMNS))
    store_rows(
        out_ptr + start, numbers, row, num_rows, column, num_columns, num_columns, ROWS, COLUMNS
    )


def tile_of(block_rows: int, block_columns: int) -> tuple[int, int]:
    """Tile of a program: whole blocks, 4096 elements or more."""
    if block_rows == 1:
        return ROW_TILE
    tile = NARROW_COLUMN_TILE if block_rows <= NARROW_COLUMN_TILE[0] else WIDE_COLUMN_TILE
    return (max(tile[0], block_rows), max(tile[1], block_columns))


def warps_of(tile: tuple[int, int]) -> int:
    """Warps of a program: at most 64 elements per thread."""
    return NUM_WARPS if tile[0] * tile[1] < 16384 else 2 * NUM_WARPS


def _grid(shape: torch.Size, tile: tuple[int, int]) -> tuple[int, int, int]:
    rows, columns = shape[-2:]
    stack = 1
    for length in shape[:-2]:
        stack *= length
    return (-(-columns // tile[1]), -(-rows // tile[0]), stack)


@quantize_op.register_cuda
def quantize_triton(matrix: Tensor, block_rows: int, block_columns: int) -> tuple[Tensor, Tensor]:
    """Values and scale bytes of the blocks."""
    matrix = matrix.contiguous()
    values = torch.empty_like(matrix, dtype=FP8)
    scales = matrix.new_empty(
        scale_shape(matrix.shape, (block_rows, block_columns)), dtype=torch.uint8
    )
    tile = tile_of(block_rows, block_columns)
    quantize_kernel[_grid(matrix.shape, tile)](
        matrix, values, scales, *matrix.shape[-2:], *tile, block_rows, block_columns,
        num_warps=warps_of(tile),
    )  # fmt: skip
    return values, scales


@quantize_row_col_op.register_cuda
def quantize_row_col_triton(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row copy, and the row copy of the transpose."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    values = matrix.new_empty((rows, columns), dtype=FP8)
    values_t = matrix.new_empty((columns, rows), dtype=FP8)
    scales = matrix.new_empty((rows, triton.cdiv(columns, group)), dtype=torch.uint8)
    scales_t = matrix.new_empty((columns, triton.cdiv(rows, group)), dtype=torch.uint8)
    tile = BOTH_TILE[group]
    quantize_row_col_kernel[_grid(matrix.shape, tile)[:2]](
        matrix, values, scales, values_t, scales_t, rows, columns, *tile, group,
        **BOTH_OPTIONS[group],
    )  # fmt: skip
    return values, scales, values_t, scales_t


@dequantize_op.register_cuda
def dequantize_triton(
    values: Tensor, scales: Tensor, block_rows: int, block_columns: int, dtype: torch.dtype
) -> Tensor:
    """Values times their block's power of two."""
    values, scales = values.contiguous(), scales.contiguous()
    out = torch.empty_like(values, dtype=dtype)
    tile = tile_of(block_rows, block_columns)
    dequantize_kernel[_grid(values.shape, tile)](
        values, scales, out, *values.shape[-2:], *tile, block_rows, block_columns,
        num_warps=warps_of(tile),
    )  # fmt: skip
    return out

"""Tiles of row-major matrices in Triton: places, loads, stores."""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def place_tile(row, column, num_rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile in rows of `stride` elements, and what of it lies in `num_rows` and `width`."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return offsets, (rows < num_rows)[:, None] & (columns < width)[None, :]


@triton.jit
def load_tile(
    matrix_ptr, row, column, num_rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A tile in fp32, zeros outside."""
    offsets, mask = place_tile(row, column, num_rows, width, stride, ROWS, COLUMNS)
    return tl.load(matrix_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(
    out_ptr, tile, row, column, num_rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Stores a tile in the result's type, up to `num_rows` and column `width`."""
    offsets, mask = place_tile(row, column, num_rows, width, stride, ROWS, COLUMNS)
    tl.store(out_ptr + offsets, tile.to(out_ptr.dtype.element_ty), mask=mask)

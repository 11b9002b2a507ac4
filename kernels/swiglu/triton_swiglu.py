"""The weighted SwiGLU in Triton, forward (quantizing or not) and backward.

It is bound by memory: 5.03 bytes per element forward with quantizing. A backward program walks all
columns of its rows, so that the routing weight's gradient is one sum in a fixed order.

Shapes: P rows, F inner width, G elements of a block.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.mxfp8.formats import FP8
from ostinato.kernels.mxfp8.triton_quantize import load_tile, quantize_tile, store_rows, store_tile
from ostinato.kernels.swiglu.op import swiglu, swiglu_backward, swiglu_quantize_op

FORWARD_TILE = (16, 128)
BACKWARD_ELEMENTS = 2048  # per step, the fastest measured; one row if it is that wide


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate)), as torch computes it."""
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def load_halves(inner_ptr, row, column, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Gate and up tiles, in fp32. Zeros outside."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    offsets = rows.to(tl.int64)[:, None] * (2 * width) + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    gate = tl.load(inner_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(inner_ptr + width + offsets, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def swiglu_kernel(
    inner_ptr,
    scale_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
):
    """One tile of the result, in the inner dtype if G is 0, else quantized."""
    column, row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    gate, up = load_halves(inner_ptr, row, column, num_rows, width, ROWS, COLUMNS)
    rows = row + tl.arange(0, ROWS)
    scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    active = (silu(gate) * up * scale[:, None]).to(inner_ptr.dtype.element_ty)
    if G == 0:
        store_rows(out_ptr, active, row, num_rows, column, width, width, ROWS, COLUMNS)
    else:
        values, scales = quantize_tile(active.to(tl.float32), ROWS, COLUMNS, 1, G)
        store_tile(
            values, scales, out_ptr, scales_ptr, row, column, num_rows, width, ROWS, COLUMNS, 1, G
        )


@triton.jit
def gate_gradient(grad, gate, up, scale):
    """Gradient of the gate: the derivative of silu is sigmoid * (1 + gate * (1 - sigmoid))."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return grad * scale[:, None] * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit
def swiglu_backward_kernel(
    grad_ptr,
    inner_ptr,
    scale_ptr,
    grad_inner_ptr,
    grad_scale_ptr,
    active_ptr,
    num_rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All columns of some rows. Results in the inner dtype."""
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for column in range(0, width, COLUMNS):
        gate, up = load_halves(inner_ptr, row, column, num_rows, width, ROWS, COLUMNS)
        grad = load_tile(grad_ptr, row, column, num_rows, width, ROWS, COLUMNS)
        plain = silu(gate) * up
        total += tl.sum(grad * plain, 1)
        active = plain * scale[:, None]
        grad_gate = gate_gradient(grad, gate, up, scale)
        grad_up = silu(gate) * (grad * scale[:, None])
        store_rows(
            grad_inner_ptr, grad_gate, row, num_rows, column, width, 2 * width, ROWS, COLUMNS
        )
        store_rows(
            grad_inner_ptr + width, grad_up, row, num_rows, column, width, 2 * width, ROWS, COLUMNS
        )
        store_rows(active_ptr, active, row, num_rows, column, width, width, ROWS, COLUMNS)
    tl.store(grad_scale_ptr + rows, total, mask=rows < num_rows)


def backward_tile(width: int) -> tuple[int, int]:
    """Rows of a program and columns of a step."""
    columns = min(1 << (width - 1).bit_length(), BACKWARD_ELEMENTS)
    return BACKWARD_ELEMENTS // columns, columns


def _launch_forward(
    inner_PG: Tensor, scale_P: Tensor, out: Tensor, scales: Tensor, group: int
) -> None:
    rows, width = inner_PG.shape[0], inner_PG.shape[1] // 2
    tile_rows, tile_columns = FORWARD_TILE
    grid = (triton.cdiv(width, tile_columns), triton.cdiv(rows, tile_rows))
    swiglu_kernel[grid](
        inner_PG.contiguous(),
        scale_P,
        out,
        scales,
        rows,
        width,
        tile_rows,
        tile_columns,
        group,
        num_warps=4,
    )


@swiglu.register_cuda
def swiglu_triton(inner_PG: Tensor, scale_P: Tensor) -> Tensor:
    """Scale * silu(gate) * up."""
    out = inner_PG.new_empty(inner_PG.shape[0], inner_PG.shape[1] // 2)
    _launch_forward(inner_PG, scale_P, out, out, 0)
    return out


@swiglu_quantize_op.register_cuda
def swiglu_quantize_triton(inner_PG: Tensor, scale_P: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The row copy of scale * silu(gate) * up."""
    rows, width = inner_PG.shape[0], inner_PG.shape[1] // 2
    values = inner_PG.new_empty((rows, width), dtype=FP8)
    scales = inner_PG.new_empty((rows, triton.cdiv(width, group)), dtype=torch.uint8)
    _launch_forward(inner_PG, scale_P, values, scales, group)
    return values, scales


@swiglu_backward.register_cuda
def swiglu_backward_triton(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inner and scale, and the recomputed rows."""
    rows, width = grad_PF.shape
    grad_inner, active = torch.empty_like(inner_PG), torch.empty_like(grad_PF)
    grad_scale = torch.empty_like(scale_P)
    tile = backward_tile(width)
    swiglu_backward_kernel[(triton.cdiv(rows, tile[0]),)](
        grad_PF.contiguous(), inner_PG.contiguous(), scale_P, grad_inner, grad_scale, active, rows,
        width, *tile, num_warps=4,
    )  # fmt: skip
    return grad_inner, grad_scale, active

"""Grouped products of MXFP8 in 128-blocks in Triton: fprop and dgrad, and wgrad.

The kernels behind `grouped_mm_mx128_op` and `grouped_wgrad_mx128_op` and their registration for
CUDA. Hopper's fp8 tensor cores know no scales and sum in less than fp32, so every 128 contracted
elements the partial sum is scaled and added in fp32. They read both operands along the contracted
dimension only: the caller brings transposed copies.

Tiles are 128 wide both ways: at 256 the accumulators no longer fit the registers.

Shapes: P rows, E experts, N columns of the result, C contracted columns, S = C/128.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.grouped_gemm.op import WIDE_GROUP, grouped_mm_mx128_op, grouped_wgrad_mx128_op
from ostinato.kernels.grouped_gemm.triton_bf16 import num_persistent_programs
from ostinato.kernels.grouped_gemm.triton_tiles import count_tiles, locate_tile
from ostinato.kernels.mxfp8.triton_quantize import power

BLOCK = tl.constexpr(WIDE_GROUP)
OPTIONS = {"num_warps": 8, "num_stages": 4}
# Columns of a gradient tile: scales along both edges make two sums live at once, and 128 columns spill.
GRADIENT_COLUMNS = 64


@triton.jit
def product_mx128_kernel(
    rows_ptr,
    row_scales_ptr,
    weights_ptr,
    weight_scales_ptr,
    ends_ptr,
    out_ptr,
    num_experts,
    width_n,
    width_c,
    EXPERTS: tl.constexpr,
):
    """out[p, n] = sum over c of rows[p, c] * weights[e, n, c]; (1, 128) times (128, 128)."""
    tiles_n = tl.cdiv(width_n, BLOCK)
    scales_c = tl.cdiv(width_c, BLOCK)
    total = count_tiles(ends_ptr, num_experts, tiles_n, BLOCK, EXPERTS)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, column = locate_tile(ends_ptr, tile, num_experts, tiles_n, BLOCK, EXPERTS)
        rows, contracted = row + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
        columns = column * BLOCK + tl.arange(0, BLOCK)
        is_row, is_column = rows < end, columns < width_n
        wide = expert.to(tl.int64)
        left = rows_ptr + rows.to(tl.int64)[:, None] * width_c + contracted[None, :]
        right = (
            weights_ptr
            + wide * width_n * width_c
            + columns[None, :] * width_c
            + contracted[:, None]
        )
        left_scales = row_scales_ptr + rows * scales_c
        right_scales = weight_scales_ptr + (wide * tiles_n + column) * scales_c
        sums = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(0, scales_c):
            is_inside = contracted < width_c - step * BLOCK
            a = tl.load(left, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            b = tl.load(right, mask=is_column[None, :] & is_inside[:, None], other=0.0)
            scale = power(tl.load(left_scales + step, mask=is_row, other=0).to(tl.int32))
            scale = scale * power(tl.load(right_scales + step).to(tl.int32))
            sums += tl.dot(a, b) * scale[:, None]
            left += BLOCK
            right += BLOCK
        out = out_ptr + rows.to(tl.int64)[:, None] * width_n + columns[None, :]
        tl.store(out, sums.to(tl.bfloat16), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def gradient_mx128_kernel(
    grads_ptr,
    grad_scales_ptr,
    rows_ptr,
    row_scales_ptr,
    ends_ptr,
    out_ptr,
    width_n,
    width_k,
    num_rows,
    BLOCK_K: tl.constexpr,
):
    """out[e, n, k] = sum over the expert's rows p of grads[n, p] * rows[k, p]: grid (k tiles, n
    tiles, experts). Experts begin and end at multiples of 128 rows.
    """
    expert = tl.program_id(2)
    # without the hint the compiler loads the rows byte by byte
    start = tl.multiple_of(tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), BLOCK)
    end = tl.load(ends_ptr + expert)
    columns_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_n, is_k = columns_n < width_n, columns_k < width_k
    places = start + tl.arange(0, BLOCK)
    scales_p = tl.cdiv(num_rows, BLOCK)
    left = grads_ptr + columns_n.to(tl.int64)[:, None] * num_rows + places[None, :]
    right = rows_ptr + columns_k.to(tl.int64)[None, :] * num_rows + places[:, None]
    left_scales = grad_scales_ptr + columns_n * scales_p
    right_scales = row_scales_ptr + columns_k * scales_p
    sums = tl.zeros((BLOCK, BLOCK_K), tl.float32)
    for step in range(start // BLOCK, end // BLOCK):
        a = tl.load(left, mask=is_n[:, None], other=0.0)
        b = tl.load(right, mask=is_k[None, :], other=0.0)
        scale_n = power(tl.load(left_scales + step, mask=is_n, other=0).to(tl.int32))
        scale_k = power(tl.load(right_scales + step, mask=is_k, other=0).to(tl.int32))
        sums += tl.dot(a, b) * scale_n[:, None] * scale_k[None, :]
        left += BLOCK
        right += BLOCK
    out = (
        out_ptr
        + expert.to(tl.int64) * width_n * width_k
        + columns_n.to(tl.int64)[:, None] * width_k
        + columns_k[None, :]
    )
    tl.store(out, sums.to(tl.bfloat16), mask=is_n[:, None] & is_k[None, :])


@grouped_mm_mx128_op.register_cuda
def grouped_mm_mx128_triton(
    rows_PK: Tensor, row_scales: Tensor, weights_ENK: Tensor, weight_scales: Tensor, ends_E: Tensor
) -> Tensor:
    """(1, 128) rows times (128, 128) weights transposed, in bf16."""
    experts, width_n, width_c = weights_ENK.shape
    out = rows_PK.new_empty((rows_PK.shape[0], width_n), dtype=torch.bfloat16)
    product_mx128_kernel[(num_persistent_programs(rows_PK.device),)](
        rows_PK.contiguous(), row_scales.contiguous(), weights_ENK.contiguous(),
        weight_scales.contiguous(), ends_E, out, experts, width_n, width_c,
        triton.next_power_of_2(experts), **OPTIONS,
    )  # fmt: skip
    return out


@grouped_wgrad_mx128_op.register_cuda
def grouped_wgrad_mx128_triton(
    grads_NP: Tensor, grad_scales: Tensor, rows_KP: Tensor, row_scales: Tensor, ends_E: Tensor
) -> Tensor:
    """Transposed (1, 128) copies, contracted along rows, in bf16."""
    (width_n, num_rows), width_k, experts = grads_NP.shape, rows_KP.shape[0], ends_E.numel()
    if num_rows % WIDE_GROUP:
        raise ValueError(f"operands have {num_rows} rows, wanted a multiple of {WIDE_GROUP}")
    out = grads_NP.new_empty((experts, width_n, width_k), dtype=torch.bfloat16)
    grid = (triton.cdiv(width_k, GRADIENT_COLUMNS), triton.cdiv(width_n, WIDE_GROUP), experts)
    gradient_mx128_kernel[grid](
        grads_NP.contiguous(), grad_scales.contiguous(), rows_KP.contiguous(),
        row_scales.contiguous(), ends_E, out, width_n, width_k, num_rows, GRADIENT_COLUMNS,
        **OPTIONS,
    )  # fmt: skip
    return out

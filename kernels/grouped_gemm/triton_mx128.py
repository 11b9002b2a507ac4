"""Grouped products of MXFP8 in 128-blocks in Triton: fprop and dgrad, and wgrad.

CUDA paths of `grouped_mm_mx128_op` and `grouped_wgrad_mx128_op`. Hopper's fp8 tensor cores support
no scales and sum in less than fp32, so after every 128 contracted elements the partial sum is
scaled and added in fp32. They read both operands only along the contracted dimension, so the caller
passes transposed copies. The scale bytes of rows are first converted to fp32 numbers, with blocks of
the contraction outermost, so that a tile reads its scales in wide loads.

Programs are persistent. kernels/README.md says how tile, warps, stages and stores were chosen; a tile
256 wide does not fit the registers.

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
from ostinato.kernels.grouped_gemm.triton_tiles import (
    aligned,
    aligned_empty,
    count_tiles,
    describe,
    load_matrix,
    locate_tile,
    num_programs,
    place_in_bands,
)
from ostinato.kernels.mxfp8.triton_quantize import power, store_rows

GROUP = tl.constexpr(WIDE_GROUP)
PRODUCT_TILE = (128, 128)
PRODUCT_OPTIONS = {"num_warps": 8, "num_stages": 4}
# smaller, since scales along both edges keep two sums in registers at once
GRADIENT_TILE = (128, 64)
GRADIENT_OPTIONS = {"num_warps": 4, "num_stages": 3}
GRADIENT_PROGRAMS = 2  # per multiprocessor
SCALES_TILE = (128, 32)


@triton.jit
def widen_scales_kernel(
    bytes_ptr, powers_ptr, num_rows, num_scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """powers[s, row] = 2**(bytes[row, s] - 127)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < num_scales)[None, :]
    byte = tl.load(bytes_ptr + rows[:, None] * num_scales + columns[None, :], mask=mask, other=0)
    out = powers_ptr + columns[None, :] * num_rows + rows[:, None]
    tl.store(out, power(byte.to(tl.int32)), mask=mask)


@triton.jit
def product_mx128_kernel(
    rows_desc,
    row_powers_ptr,
    weights_desc,
    weight_scales_ptr,
    ends_ptr,
    out_desc,
    out_ptr,
    num_experts,
    num_rows,
    width_n,
    width_c,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """out[p, n] = sum over c of rows[p, c] * weights[e, n, c]; (1, 128) times (128, 128)."""
    tiles_n = tl.cdiv(width_n, BLOCK_N)
    scales_n, scales_c = tl.cdiv(width_n, GROUP), tl.cdiv(width_c, GROUP)
    total = count_tiles(ends_ptr, num_experts, tiles_n, BLOCK_M, EXPERTS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, tile_n = locate_tile(
            ends_ptr, tile, num_experts, tiles_n, BLOCK_M, EXPERTS
        )
        column = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        weight_scales = weight_scales_ptr + (expert * scales_n + column // GROUP) * scales_c
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, scales_c):
            a = rows_desc.load([row, step * GROUP])
            b = load_matrix(weights_desc, expert, column, step * GROUP, BLOCK_N, GROUP)
            right = power(tl.load(weight_scales + step).to(tl.int32))
            left = tl.load(row_powers_ptr + step * num_rows + rows, mask=rows < end, other=0.0)
            sums += tl.dot(a, b.T) * (left * right)[:, None]
        if row + BLOCK_M <= end:
            out_desc.store([row, column], sums.to(tl.bfloat16))
        else:
            store_rows(out_ptr, sums, row, end, column, width_n, out_stride, BLOCK_M, BLOCK_N)


@triton.jit
def gradient_mx128_kernel(
    grads_desc,
    grad_powers_ptr,
    rows_desc,
    row_powers_ptr,
    ends_ptr,
    out_ptr,
    num_experts,
    width_n,
    width_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[e, n, k] = sum over the expert's rows p of grads[n, p] * rows[k, p]. Experts begin and
    end at multiples of 128 rows.
    """
    tiles_n, tiles_k = tl.cdiv(width_n, BLOCK_N), tl.cdiv(width_k, BLOCK_K)
    an_expert = tiles_n * tiles_k
    for tile in tl.range(tl.program_id(0), num_experts * an_expert, tl.num_programs(0)):
        expert = tile // an_expert
        tile_n, tile_k = place_in_bands(tile - expert * an_expert, tiles_n, tiles_k)
        n, k = tile_n * BLOCK_N, tile_k * BLOCK_K
        columns_n, columns_k = n + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
        is_n, is_k = columns_n < width_n, columns_k < width_k
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0) // GROUP
        end = tl.load(ends_ptr + expert) // GROUP
        sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for step in range(start, end):
            a = grads_desc.load([n, step * GROUP])
            b = rows_desc.load([k, step * GROUP])
            left = tl.load(grad_powers_ptr + step * width_n + columns_n, mask=is_n, other=0.0)
            right = tl.load(row_powers_ptr + step * width_k + columns_k, mask=is_k, other=0.0)
            sums += tl.dot(a, b.T) * left[:, None] * right[None, :]
        out = out_ptr + expert.to(tl.int64) * width_n * width_k
        store_rows(out, sums, n, width_n, k, width_k, width_k, BLOCK_N, BLOCK_K)


def widen_scales(scales: Tensor) -> Tensor:
    """The powers of two of (rows, S) scale bytes as (S, rows) fp32 numbers."""
    rows, width = scales.shape
    powers = scales.new_empty((width, rows), dtype=torch.float32)
    grid = (triton.cdiv(rows, SCALES_TILE[0]), triton.cdiv(width, SCALES_TILE[1]))
    widen_scales_kernel[grid](scales.contiguous(), powers, rows, width, *SCALES_TILE)
    return powers


@grouped_mm_mx128_op.register_cuda
def grouped_mm_mx128_triton(
    rows_PK: Tensor, row_scales: Tensor, weights_ENK: Tensor, weight_scales: Tensor, ends_E: Tensor
) -> Tensor:
    """(1, 128) rows times (128, 128) weights transposed, in bf16."""
    (experts, width_n, width_c), num_rows = weights_ENK.shape, rows_PK.shape[0]
    out = aligned_empty((num_rows, width_n), torch.bfloat16, rows_PK.device)
    if rows_PK.numel() == 0:
        return out.contiguous().zero_()
    block_m, block_n = PRODUCT_TILE
    product_mx128_kernel[(num_programs(rows_PK.device),)](
        describe(aligned(rows_PK), block_m, WIDE_GROUP), widen_scales(row_scales),
        describe(aligned(weights_ENK), 1, block_n, WIDE_GROUP), weight_scales.contiguous(), ends_E,
        describe(out, block_m, block_n), out, experts, num_rows, width_n, width_c,
        out.stride(0), *PRODUCT_TILE, triton.next_power_of_2(experts), **PRODUCT_OPTIONS,
    )  # fmt: skip
    return out.contiguous()


@grouped_wgrad_mx128_op.register_cuda
def grouped_wgrad_mx128_triton(
    grads_NP: Tensor, grad_scales: Tensor, rows_KP: Tensor, row_scales: Tensor, ends_E: Tensor
) -> Tensor:
    """Transposed (1, 128) copies, contracted along rows, in bf16."""
    (width_n, num_rows), width_k, experts = grads_NP.shape, rows_KP.shape[0], ends_E.numel()
    if num_rows % WIDE_GROUP:
        raise ValueError(f"operands have {num_rows} rows, wanted a multiple of {WIDE_GROUP}")
    out = grads_NP.new_empty((experts, width_n, width_k), dtype=torch.bfloat16)
    if num_rows == 0:
        return out.zero_()
    block_n, block_k = GRADIENT_TILE
    gradient_mx128_kernel[(num_programs(grads_NP.device, GRADIENT_PROGRAMS),)](
        describe(aligned(grads_NP), block_n, WIDE_GROUP), widen_scales(grad_scales),
        describe(aligned(rows_KP), block_k, WIDE_GROUP), widen_scales(row_scales), ends_E, out,
        experts, width_n, width_k, *GRADIENT_TILE, **GRADIENT_OPTIONS,
    )  # fmt: skip
    return out

"""Grouped products of plain operands in Triton: fprop, dgrad and wgrad.

CUDA paths of `grouped_mm_op` and `grouped_wgrad_op`. Sums are fp32, results have the operands'
dtype. fprop and dgrad are one kernel: bf16 tensor cores read either orientation of the weights.
Operands must be bf16: tensor cores would round fp32 to 11 bits. MXFP8 in 32-blocks is dequantized
first. Programs are persistent; kernels/README.md says how tile, warps, stages and stores were chosen.

Shapes: P rows, E experts, N columns of the result, C contracted columns.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.grouped_gemm.op import grouped_mm_op, grouped_wgrad_op
from ostinato.kernels.grouped_gemm.triton_tiles import (
    aligned,
    count_tiles,
    describe,
    load_matrix,
    locate_tile,
    num_programs,
    place_in_bands,
    store_halves,
)

# rows, columns and contracted elements. 8 warps: 128 accumulators per thread
TILE = (128, 256, 64)
OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def product_kernel(
    rows_desc,
    weights_desc,
    ends_ptr,
    out_ptr,
    num_experts,
    width_n,
    width_c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """out[p, n] = sum over c of rows[p, c] * weights[e, n, c]; TRANSPOSED: weights[e, c, n]."""
    tiles_n = tl.cdiv(width_n, BLOCK_N)
    total = count_tiles(ends_ptr, num_experts, tiles_n, BLOCK_M, EXPERTS)
    # flattened, so that the next tile's first loads overlap this tile's store
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        expert, row, end, tile_n = locate_tile(
            ends_ptr, tile, num_experts, tiles_n, BLOCK_M, EXPERTS
        )
        column = tile_n * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width_c, BLOCK_C):
            a = rows_desc.load([row, start])
            if TRANSPOSED:
                b = load_matrix(weights_desc, expert, start, column, BLOCK_C, BLOCK_N)
                sums = tl.dot(a, b, sums)
            else:
                b = load_matrix(weights_desc, expert, column, start, BLOCK_N, BLOCK_C)
                sums = tl.dot(a, b.T, sums)
        store_halves(out_ptr, sums, row, end, column, width_n, BLOCK_M, BLOCK_N)


@triton.jit
def gradient_kernel(
    grads_desc,
    rows_desc,
    ends_ptr,
    out_ptr,
    num_experts,
    width_n,
    width_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[e, n, k] = sum over the expert's rows of grads[p, n] * rows[p, k], zeros without rows."""
    tiles_n, tiles_k = tl.cdiv(width_n, BLOCK_N), tl.cdiv(width_k, BLOCK_K)
    an_expert = tiles_n * tiles_k
    for tile in tl.range(tl.program_id(0), num_experts * an_expert, tl.num_programs(0)):
        expert = tile // an_expert
        tile_n, tile_k = place_in_bands(tile - expert * an_expert, tiles_n, tiles_k)
        n, k = tile_n * BLOCK_N, tile_k * BLOCK_K
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        whole = start + (end - start) // BLOCK_P * BLOCK_P
        sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for row in range(start, whole, BLOCK_P):
            a, b = grads_desc.load([row, n]), rows_desc.load([row, k])
            sums = tl.dot(a.T, b, sums)
        if whole < end:
            # the block's last rows are the next expert's: zero in both, since NaN times 0 is NaN
            is_row = (tl.arange(0, BLOCK_P) < end - whole)[:, None]
            a = tl.where(is_row, grads_desc.load([whole, n]), 0.0)
            b = tl.where(is_row, rows_desc.load([whole, k]), 0.0)
            sums = tl.dot(a.T, b, sums)
        out = out_ptr + expert.to(tl.int64) * width_n * width_k
        store_halves(out, sums, n, width_n, k, width_k, BLOCK_N, BLOCK_K)


def _check_dtypes(left: Tensor, right: Tensor) -> None:
    if left.dtype != torch.bfloat16 or right.dtype != torch.bfloat16:
        raise ValueError(
            f"operands are {left.dtype} and {right.dtype}, wanted torch.bfloat16 for both: "
            "kernels/moe/op.py computes the experts' products in fp32"
        )


@grouped_mm_op.register_cuda
def grouped_mm_triton(
    rows_PK: Tensor, weights_ENK: Tensor, ends_E: Tensor, transposed: bool
) -> Tensor:
    """rows @ weights.T by expert. With `transposed`, rows_PN @ weights_ENK."""
    _check_dtypes(rows_PK, weights_ENK)
    experts, width_n, width_c = weights_ENK.shape
    if transposed:
        width_n, width_c = width_c, width_n
    out = rows_PK.new_empty(rows_PK.shape[0], width_n)
    if rows_PK.numel() == 0:
        return out.zero_()
    block_m, block_n, block_c = TILE
    weight_block = (block_c, block_n) if transposed else (block_n, block_c)
    product_kernel[(num_programs(rows_PK.device),)](
        describe(aligned(rows_PK), block_m, block_c),
        describe(aligned(weights_ENK), 1, *weight_block), ends_E, out, experts, width_n, width_c,
        *TILE, triton.next_power_of_2(experts), transposed, **OPTIONS,
    )  # fmt: skip
    return out


@grouped_wgrad_op.register_cuda
def grouped_wgrad_triton(grads_PN: Tensor, rows_PK: Tensor, ends_E: Tensor) -> Tensor:
    """grads.T @ rows by expert. Zeros for an expert without rows."""
    _check_dtypes(grads_PN, rows_PK)
    width_n, width_k, experts = grads_PN.shape[1], rows_PK.shape[1], ends_E.numel()
    out = rows_PK.new_empty(experts, width_n, width_k)
    if rows_PK.shape[0] == 0:
        return out.zero_()
    block_n, block_k, block_p = TILE
    gradient_kernel[(num_programs(rows_PK.device),)](
        describe(aligned(grads_PN), block_p, block_n),
        describe(aligned(rows_PK), block_p, block_k), ends_E, out, experts, width_n, width_k, *TILE,
        **OPTIONS,
    )  # fmt: skip
    return out

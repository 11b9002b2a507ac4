"""Grouped products of plain operands in Triton: fprop, dgrad and wgrad.

The kernels behind `grouped_mm_op` and `grouped_wgrad_op` and their registration for CUDA. Sums are
fp32, results have the operands' dtype. fprop and dgrad are one persistent kernel: bf16 tensor cores
read either orientation of the weights. MXFP8 in 32-blocks comes here after `dequantize`.

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
from ostinato.kernels.grouped_gemm.triton_tiles import count_tiles, locate_tile

# (rows, columns, contracted) of a tile, warps, stages. 8 warps: 128 accumulators a thread at most.
PRODUCT_TILE = (128, 256, 64)
PRODUCT_OPTIONS = {"num_warps": 8, "num_stages": 3}
# the strides of weights read the other way round cost registers that a wider tile would spill
TRANSPOSED_TILE = (128, 128, 64)
GRADIENT_TILE = (128, 128, 64)
GRADIENT_OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def product_kernel(
    rows_ptr,
    weights_ptr,
    ends_ptr,
    out_ptr,
    num_experts,
    width_n,
    width_c,
    stride_e,
    stride_n,
    stride_c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """out[p, n] = sum over c of rows[p, c] * weights[e, n, c], each program some tiles."""
    tiles_n = tl.cdiv(width_n, BLOCK_N)
    total = count_tiles(ends_ptr, num_experts, tiles_n, BLOCK_M, EXPERTS)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, column = locate_tile(
            ends_ptr, tile, num_experts, tiles_n, BLOCK_M, EXPERTS
        )
        rows = row + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        contracted = tl.arange(0, BLOCK_C)
        is_row, is_column = rows < end, columns < width_n
        left = rows_ptr + rows.to(tl.int64)[:, None] * width_c + contracted[None, :]
        right = (
            weights_ptr
            + expert.to(tl.int64) * stride_e
            + columns[None, :] * stride_n
            + contracted[:, None] * stride_c
        )
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width_c, BLOCK_C):
            is_inside = contracted < width_c - start
            a = tl.load(left, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            b = tl.load(right, mask=is_column[None, :] & is_inside[:, None], other=0.0)
            sums = tl.dot(a, b, sums)
            left += BLOCK_C
            right += BLOCK_C * stride_c
        out = out_ptr + rows.to(tl.int64)[:, None] * width_n + columns[None, :]
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def gradient_kernel(
    grads_ptr,
    rows_ptr,
    ends_ptr,
    out_ptr,
    width_n,
    width_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[e, n, k] = sum over the expert's rows of grads[p, n] * rows[p, k]: grid (k tiles, n tiles,
    experts). An expert without rows gets zeros.
    """
    expert = tl.program_id(2)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    columns_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns_k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    places = tl.arange(0, BLOCK_P)
    is_n, is_k = columns_n < width_n, columns_k < width_k
    first = (start + places).to(tl.int64)
    left = grads_ptr + first[None, :] * width_n + columns_n[:, None]
    right = rows_ptr + first[:, None] * width_k + columns_k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for row in range(start, end, BLOCK_P):
        is_row = places < end - row
        a = tl.load(left, mask=is_n[:, None] & is_row[None, :], other=0.0)
        b = tl.load(right, mask=is_row[:, None] & is_k[None, :], other=0.0)
        sums = tl.dot(a, b, sums)
        left += BLOCK_P * width_n
        right += BLOCK_P * width_k
    out = (
        out_ptr
        + expert.to(tl.int64) * width_n * width_k
        + columns_n.to(tl.int64)[:, None] * width_k
        + columns_k[None, :]
    )
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=is_n[:, None] & is_k[None, :])


def num_persistent_programs(device: torch.device) -> int:
    """One per multiprocessor. On a CPU, where kernels are interpreted, a few."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@grouped_mm_op.register_cuda
def grouped_mm_triton(
    rows_PK: Tensor, weights_ENK: Tensor, ends_E: Tensor, transposed: bool
) -> Tensor:
    """rows @ weights.T by expert. With `transposed`, rows_PN @ weights_ENK."""
    rows_PK, weights_ENK = rows_PK.contiguous(), weights_ENK.contiguous()
    stride_e, stride_n, stride_c = weights_ENK.stride()
    experts, width_n, width_c = weights_ENK.shape
    if transposed:
        width_n, width_c, stride_n, stride_c = width_c, width_n, stride_c, stride_n
    out = rows_PK.new_empty(rows_PK.shape[0], width_n)
    product_kernel[(num_persistent_programs(rows_PK.device),)](
        rows_PK, weights_ENK, ends_E, out, experts, width_n, width_c, stride_e, stride_n, stride_c,
        *(TRANSPOSED_TILE if transposed else PRODUCT_TILE), triton.next_power_of_2(experts),
        **PRODUCT_OPTIONS,
    )  # fmt: skip
    return out


@grouped_wgrad_op.register_cuda
def grouped_wgrad_triton(grads_PN: Tensor, rows_PK: Tensor, ends_E: Tensor) -> Tensor:
    """grads.T @ rows by expert. Zeros for an expert without rows."""
    width_n, width_k, experts = grads_PN.shape[1], rows_PK.shape[1], ends_E.numel()
    out = rows_PK.new_empty(experts, width_n, width_k)
    block_n, block_k, block_p = GRADIENT_TILE
    grid = (triton.cdiv(width_k, block_k), triton.cdiv(width_n, block_n), experts)
    gradient_kernel[grid](
        grads_PN.contiguous(), rows_PK.contiguous(), ends_E, out, width_n, width_k, block_n,
        block_k, block_p, **GRADIENT_OPTIONS,
    )  # fmt: skip
    return out

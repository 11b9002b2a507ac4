"""Layout of rows by expert in Triton.

Results do not depend on the order in which programs run: the plan counts each block of copies,
scans the counts, then places each block's copies, and a token's rows are summed slot by slot.

Shapes: N tokens, K experts per token, S = N*K copies, E experts, D model width, P rows, B copies of
a block.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.permutation.op import RowPlan, permute, plan_rows_op, unpermute

PLAN_BLOCK = 128
PLAN_WARPS = 8
ROW_TILE = (8, 512)
TOKEN_TILE = (4, 512)


@triton.jit
def load_experts(experts_ptr, num_copies, BLOCK: tl.constexpr):
    """Copies of this program's block and their experts. -1 past the last copy."""
    copies = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(experts_ptr + copies, mask=copies < num_copies, other=-1).to(tl.int32)
    return copies, chosen


@triton.jit
def count_kernel(experts_ptr, counts_ptr, num_copies, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Number of a block's copies per expert."""
    _, chosen = load_experts(experts_ptr, num_copies, BLOCK)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + experts, counts)


@triton.jit
def place_kernel(
    experts_ptr,
    first_ptr,
    place_ptr,
    source_ptr,
    num_copies,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Row of each copy: its expert's first row for this block, plus the copies before it in the block."""
    copies, chosen = load_experts(experts_ptr, num_copies, BLOCK)
    is_earlier = copies[None, :] < copies[:, None]
    rank = tl.sum((is_earlier & (chosen[:, None] == chosen[None, :])).to(tl.int32), 1)
    mask = copies < num_copies
    first = tl.load(first_ptr + tl.program_id(0) * EXPERTS + chosen, mask=mask, other=0)
    row = first + rank
    tl.store(place_ptr + copies, row.to(tl.int64), mask=mask)
    tl.store(source_ptr + row, (copies // TOP_K).to(tl.int64), mask=mask)


@triton.jit
def permute_kernel(
    tokens_ptr, source_ptr, rows_ptr, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A tile of rows, with zeros for padding."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(source_ptr + rows, mask=rows < num_rows, other=-1)
    inside = (columns < width)[None, :]
    values = tl.load(
        tokens_ptr + source[:, None] * width + columns[None, :],
        mask=(source >= 0)[:, None] & inside,
        other=0,
    )
    tl.store(
        rows_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :],
        values,
        mask=(rows < num_rows)[:, None] & inside,
    )


@triton.jit
def unpermute_kernel(
    rows_ptr,
    place_ptr,
    out_ptr,
    num_tokens,
    width,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of tokens, slot after slot."""
    tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (columns < width)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for slot in tl.static_range(TOP_K):
        place = tl.load(place_ptr + tokens * TOP_K + slot, mask=is_token, other=0)
        part = tl.load(rows_ptr + place[:, None] * width + columns[None, :], mask=mask, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + tokens.to(tl.int64)[:, None] * width + columns[None, :], total, mask=mask)


@plan_rows_op.register_cuda
def plan_rows_triton(
    experts_NK: Tensor, num_experts: int, align: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Place, source and ends."""
    experts_NK = experts_NK.contiguous()
    num_copies, top_k = experts_NK.numel(), experts_NK.shape[1]
    blocks, padded = triton.cdiv(num_copies, PLAN_BLOCK), triton.next_power_of_2(num_experts)
    counts = experts_NK.new_empty((blocks, padded), dtype=torch.int32)
    count_kernel[(blocks,)](experts_NK, counts, num_copies, PLAN_BLOCK, padded)
    totals_E = counts.sum(0, dtype=torch.int32)
    aligned_E = (totals_E + align - 1) // align * align
    ends_E = aligned_E.cumsum(0, dtype=torch.int32)
    before = counts.cumsum(0, dtype=torch.int32) - counts
    first = before + (ends_E - aligned_E)
    place_NK = torch.empty_like(experts_NK)
    source_P = experts_NK.new_full((num_rows,), -1)
    place_kernel[(blocks,)](
        experts_NK, first, place_NK, source_P, num_copies, top_k, PLAN_BLOCK, padded,
        num_warps=PLAN_WARPS,
    )  # fmt: skip
    return place_NK, source_P, ends_E[:num_experts].contiguous()


@permute.register_cuda
def permute_triton(tokens_ND: Tensor, plan: RowPlan) -> Tensor:
    """Rows by source, zeros for padding."""
    flat = tokens_ND.contiguous()
    if flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    width, num_rows = flat.shape[1], plan.source_P.numel()
    rows_PD = flat.new_empty(num_rows, width)
    grid = (triton.cdiv(width, ROW_TILE[1]), triton.cdiv(num_rows, ROW_TILE[0]))
    permute_kernel[grid](flat, plan.source_P, rows_PD, num_rows, width, *ROW_TILE)
    return rows_PD.view(tokens_ND.dtype)


@unpermute.register_cuda
def unpermute_triton(rows_PD: Tensor, plan: RowPlan) -> Tensor:
    """Sums over K in slot order, in fp32."""
    (num_tokens, top_k), width = plan.place_NK.shape, rows_PD.shape[1]
    out = rows_PD.new_empty((num_tokens, width), dtype=torch.float32)
    grid = (triton.cdiv(width, TOKEN_TILE[1]), triton.cdiv(num_tokens, TOKEN_TILE[0]))
    unpermute_kernel[grid](
        rows_PD.contiguous(), plan.place_NK.contiguous(), out, num_tokens, width, top_k,
        *TOKEN_TILE,
    )  # fmt: skip
    return out

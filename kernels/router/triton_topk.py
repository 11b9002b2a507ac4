"""The router's choice in Triton: scores, groups, top-k, weights and balancing sums in one pass.

One read of the logits; each program keeps its tokens' rows in registers and takes the best expert K
times (of equals the first). Balancing sums leave by program and are added outside, in order.

Shapes: N tokens, E experts, K experts a token, G groups of M experts, B tokens of a program.
"""

# Triton's decorators and device functions have types of their own that Python checkers misread.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.router.op import router_topk_op

TOKENS = 8
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def drop_best(values, WIDTH: tl.constexpr):
    """The largest of each row, its index, and the rows without it."""
    best = tl.max(values, 1)
    index = tl.argmax(values, 1, tie_break_left=True)
    is_best = tl.arange(0, WIDTH)[None, :] == index[:, None]
    return best, index, is_best


@triton.jit
def keep_groups(
    biased, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr
):
    """Lowers the experts of all but the best groups; a group counts by its two best."""
    M: tl.constexpr = EXPERTS // GROUPS
    rows = tl.reshape(biased, (BLOCK * GROUPS, M))
    first, _, is_first = drop_best(rows, M)
    second = tl.max(tl.where(is_first, LOWEST, rows), 1)
    totals = tl.reshape(first + second, (BLOCK, GROUPS))
    kept = tl.zeros((BLOCK, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        _, _, is_best = drop_best(totals, GROUPS)
        kept = tl.where(is_best, 1, kept)
        totals = tl.where(is_best, LOWEST, totals)
    grouped = tl.reshape(biased, (BLOCK, GROUPS, M))
    return tl.reshape(tl.where(kept[:, :, None] > 0, grouped, LOWEST), (BLOCK, EXPERTS))


@triton.jit
def router_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    sums_ptr,
    num_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One block of tokens."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    experts, slots = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_token, is_expert = tokens < num_tokens, experts < num_experts
    mask = is_token[:, None] & is_expert[None, :]
    logits = tl.load(
        logits_ptr + tokens[:, None] * num_experts + experts[None, :],
        mask=mask,
        other=float("-inf"),
    ).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        top = tl.where(is_token, tl.max(logits, 1), 0.0)
        powers = tl.exp(logits - top[:, None])
        scores = powers / tl.where(is_token, tl.sum(powers, 1), 1.0)[:, None]
    scores = tl.where(mask, scores, 0.0)
    biased = scores + tl.load(bias_ptr + experts, mask=is_expert, other=0.0)[None, :]
    biased = tl.where(mask, biased, LOWEST)
    if GROUPS > 1:
        biased = keep_groups(biased, BLOCK, EXPERTS, GROUPS, KEPT)
    chosen = tl.zeros((BLOCK, SLOTS), tl.float32)
    indices = tl.zeros((BLOCK, SLOTS), tl.int32)
    taken = tl.zeros((BLOCK, EXPERTS), tl.int32)
    for slot in tl.static_range(TOP_K):
        _, index, is_best = drop_best(biased, EXPERTS)
        score = tl.sum(tl.where(is_best, scores, 0.0), 1)
        here = (slots == slot)[None, :]
        chosen = tl.where(here, score[:, None], chosen)
        indices = tl.where(here, index[:, None], indices)
        taken = tl.where(is_best, 1, taken)
        biased = tl.where(is_best, LOWEST, biased)
    weights = chosen / tl.where(is_token, tl.sum(chosen, 1), 1.0)[:, None]
    places = tokens[:, None] * TOP_K + slots[None, :]
    out_mask = is_token[:, None] & (slots < TOP_K)[None, :]
    tl.store(weights_ptr + places, weights, mask=out_mask)
    tl.store(experts_ptr + places, indices.to(tl.int64), mask=out_mask)
    block = tl.program_id(0) * num_experts + experts
    counts = tl.sum(tl.where(mask, taken, 0), 0)
    tl.store(counts_ptr + block, counts, mask=is_expert)
    tl.store(sums_ptr + block, tl.sum(scores, 0), mask=is_expert)


@router_topk_op.register_cuda
def router_topk_triton(
    logits_NE: Tensor, bias_E: Tensor, top_k: int, score: str, num_groups: int, groups_kept: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, experts, and balancing sums."""
    logits_NE = logits_NE.contiguous()
    tokens, experts = logits_NE.shape
    padded = triton.next_power_of_2(experts)
    if num_groups > 1 and padded != experts:
        raise ValueError(f"num_experts={experts} in groups, wanted a power of two")
    blocks = triton.cdiv(tokens, TOKENS)
    weights_NK = logits_NE.new_empty((tokens, top_k), dtype=torch.float32)
    experts_NK = logits_NE.new_empty((tokens, top_k), dtype=torch.int64)
    counts = logits_NE.new_empty((blocks, experts), dtype=torch.int32)
    sums = logits_NE.new_empty((blocks, experts), dtype=torch.float32)
    router_kernel[(blocks,)](
        logits_NE, bias_E.contiguous(), weights_NK, experts_NK, counts, sums, tokens, experts,
        top_k, triton.next_power_of_2(top_k), score == "sigmoid", num_groups, groups_kept, TOKENS,
        padded, num_warps=4,
    )  # fmt: skip
    return weights_NK, experts_NK, counts.sum(0, dtype=torch.int32), sums.sum(0)

"""Layout of token copies by expert for grouped products, and the sums of their results.

`permute` and `unpermute` are adjoint to each other, so each is the other's backward.

An expert's rows are filled up to a multiple of `align` with rows of zeros. On a GPU the number of
rows is a bound (`largest_rows`) that does not depend on the experts, so that the host does not wait
for the device; rows after the last expert's are unused. Copies keep token order within an expert,
without atomics, so the layout is always the same.

Shapes: N tokens, K experts per token, S = N*K copies, E experts, D model width, P rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.kernels.operation import Operation


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Positions of the token copies, sorted by expert."""

    place_NK: Tensor
    """Row of each copy."""
    source_P: Tensor
    """Token of each row; -1 for padding."""
    ends_E: Tensor
    """int32: the row after each expert's last, padding included."""


def largest_rows(num_copies: int, num_experts: int, align: int) -> int:
    """Number of rows that suffices for every choice of experts."""
    used = min(num_experts, num_copies)
    return (num_copies + used * (align - 1)) // align * align


@Operation
def plan_rows_op(
    experts_NK: Tensor, num_experts: int, align: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Place, source and ends. See `RowPlan`."""
    flat_S = experts_NK.reshape(-1)
    sorted_S, order_S = torch.sort(flat_S, stable=True)
    counts_E = torch.bincount(flat_S, minlength=num_experts)
    padded_E = (counts_E + align - 1) // align * align
    ends_E = padded_E.cumsum(0)
    shift_E = ends_E - padded_E - (counts_E.cumsum(0) - counts_E)
    row_S = torch.arange(flat_S.numel(), device=flat_S.device) + shift_E[sorted_S]
    place_S = torch.empty_like(order_S)
    place_S[order_S] = row_S
    source_P = order_S.new_full((num_rows,), -1)
    source_P[row_S] = torch.div(order_S, experts_NK.shape[1], rounding_mode="floor")
    return place_S.view(experts_NK.shape), source_P, ends_E.to(torch.int32)


def plan_rows(experts_NK: Tensor, num_experts: int, align: int) -> RowPlan:
    """Gives every copy a row among those of its expert."""
    num_rows = largest_rows(experts_NK.numel(), num_experts, align)
    if not experts_NK.is_cuda:
        # on a CPU reading the counts is free, and fewer rows are less work
        counts_E = torch.bincount(experts_NK.reshape(-1), minlength=num_experts)
        num_rows = int(((counts_E + align - 1) // align * align).sum())
    return RowPlan(*plan_rows_op(experts_NK, num_experts, align, num_rows))


@Operation
def permute(tokens_ND: Tensor, plan: RowPlan) -> Tensor:
    """Copies each token to its rows. Padding rows are zeros. Accepts any dtype, including bytes."""
    # as bytes, since torch cannot mask fp8; its zeros are zero bytes
    flat = tokens_ND.view(torch.uint8) if tokens_ND.element_size() == 1 else tokens_ND
    rows_PD = flat.index_select(0, plan.source_P.clamp(min=0))
    rows_PD[plan.source_P < 0] = 0
    return rows_PD.view(tokens_ND.dtype)


@Operation
def unpermute(rows_PD: Tensor, plan: RowPlan) -> Tensor:
    """Sums each token's rows in slot order, in fp32 or better."""
    wide = torch.promote_types(rows_PD.dtype, torch.float32)
    total_ND = None
    for place_N in plan.place_NK.unbind(1):
        part_ND = rows_PD.index_select(0, place_N).to(wide)
        total_ND = part_ND if total_ND is None else total_ND.add_(part_ND)
    if total_ND is None:
        return rows_PD.new_zeros(plan.place_NK.shape[0], rows_PD.shape[1], dtype=wide)
    return total_ND

"""A mixture-of-experts layer's experts in bf16 or MXFP8, forward and backward.

Routing is the caller's. kernels/moe/op.py is the same layer in fp32, tuned for a CPU's cache.

Gradients pass straight through roundings. The routing weight is multiplied in before the second
product, so its gradient is a row's dot product in the SwiGLU's backward. The backward pass keeps
the dispatched rows (rounded), the first product in the plain dtype and the rounded weights, and
recomputes the SwiGLU's rows. No gradient is computed for frozen tokens or matrices.

Shapes: N tokens, K experts per token, E experts, D model width, F inner width, G = 2F, P rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.accelerator import check_runs_grouped_products
from ostinato.kernels.grouped_gemm.op import Operand, grouped_mm, grouped_wgrad
from ostinato.kernels.moe.precision import OperandPrecision
from ostinato.kernels.mxfp8.formats import MxTensor
from ostinato.kernels.permutation.op import RowPlan, permute, plan_rows, unpermute
from ostinato.kernels.swiglu.op import swiglu, swiglu_backward, swiglu_quantize


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows by expert, and their plan for the way back."""

    rows: Operand
    scale_P: Tensor
    """Routing weight of each row; 0 for padding."""
    plan: RowPlan


def dispatch(
    tokens_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    num_experts: int,
    precision: OperandPrecision,
) -> Dispatched:
    """Rounds tokens, then lays them out by expert. A block lies within a token, so the other order
    would give the same result with K times as much rounding.
    """
    plan = plan_rows(experts_NK, num_experts, precision.row_align)
    tokens = precision.round_rows(tokens_ND)
    if isinstance(tokens, MxTensor):
        rows: Operand = MxTensor(
            permute(tokens.values, plan), permute(tokens.scales, plan), tokens.block
        )
    else:
        rows = permute(tokens, plan)
    scale_P = weights_NK.new_zeros(plan.source_P.numel())
    scale_P = scale_P.index_copy(0, plan.place_NK.flatten(), weights_NK.flatten())
    return Dispatched(rows, scale_P, plan)


def _pack(operand: Operand) -> tuple[tuple[Tensor, ...], Any]:
    """An operand as plain tensors, which autograd can save, and the block that `_unpack` needs."""
    if isinstance(operand, MxTensor):
        return (operand.values, operand.scales), operand.block
    return (operand,), None


def _unpack(tensors: list[Tensor], block: Any) -> Operand:
    first = tensors.pop(0)
    return first if block is None else MxTensor(first, tensors.pop(0), block)


def _activate(inner_PG: Tensor, scale_P: Tensor, precision: OperandPrecision) -> Operand:
    """The second product's rows, rounded."""
    if precision.group is not None and not precision.emulated:
        return swiglu_quantize(inner_PG, scale_P, precision.group)
    return precision.round_rows(swiglu(inner_PG, scale_P))


def _round_gradient(
    grad: Tensor, precision: OperandPrecision, *, for_weights: bool
) -> tuple[Operand, Operand]:
    """Copies for a product over columns and for a weight gradient. They are the same if no weight
    gradient is needed.
    """
    if for_weights:
        return precision.round_both(grad)
    rounded = precision.round_rows(grad)
    return rounded, rounded


class _GroupedMlp(torch.autograd.Function):
    """Forward and backward of `grouped_mlp`."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
        precision: OperandPrecision,
    ) -> Tensor:
        sent = dispatch(tokens_ND, experts_NK, weights_NK, gate_up_EGD.shape[0], precision)
        plan = sent.plan
        gate_up, down = precision.round_weights(gate_up_EGD), precision.round_weights(down_EDF)
        inner_PG = grouped_mm(sent.rows, gate_up, plan.ends_E)
        active = _activate(inner_PG, sent.scale_P, precision)
        output_PD = grouped_mm(active, down, plan.ends_E)
        output_ND = unpermute(output_PD, plan).to(tokens_ND.dtype)
        packed, ctx.blocks = [], []
        for operand in (sent.rows, gate_up, down):
            tensors, block = _pack(operand)
            packed.extend(tensors)
            ctx.blocks.append(block)
        ctx.save_for_backward(
            inner_PG, sent.scale_P, plan.place_NK, plan.source_P, plan.ends_E, *packed
        )
        ctx.precision = precision
        ctx.dtypes = (tokens_ND.dtype, gate_up_EGD.dtype, down_EDF.dtype)
        return output_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inner_PG, scale_P, place_NK, source_P, ends_E, *packed = ctx.saved_tensors
        rows, gate_up, down = (_unpack(packed, block) for block in ctx.blocks)
        precision, plan = ctx.precision, RowPlan(place_NK, source_P, ends_E)
        grad_PD = permute(grad_ND.to(precision.dtype), plan)
        needs_tokens, _, _, needs_gate_up, needs_down, _ = ctx.needs_input_grad
        tokens_dtype, gate_up_dtype, down_dtype = ctx.dtypes
        grad_tokens_ND = grad_gate_up_EGD = grad_down_EDF = None
        grad_row, grad_col = _round_gradient(grad_PD, precision, for_weights=needs_down)
        grad_active_PF = grouped_mm(grad_row, down, ends_E, transposed=True)
        grad_inner_PG, grad_scale_P, active_PF = swiglu_backward(grad_active_PF, inner_PG, scale_P)
        if needs_down:
            active_col = precision.round_for_wgrad(active_PF)
            grad_down_EDF = grouped_wgrad(grad_col, active_col, ends_E).to(down_dtype)
        inner_row, inner_col = _round_gradient(grad_inner_PG, precision, for_weights=needs_gate_up)
        if needs_gate_up:
            rows_col = precision.recopy_for_wgrad(rows)
            grad_gate_up_EGD = grouped_wgrad(inner_col, rows_col, ends_E).to(gate_up_dtype)
        if needs_tokens:
            grad_rows_PD = grouped_mm(inner_row, gate_up, ends_E, transposed=True)
            grad_tokens_ND = unpermute(grad_rows_PD, plan).to(tokens_dtype)
        grad_NK = grad_scale_P.index_select(0, place_NK.flatten()).view(place_NK.shape)
        return grad_tokens_ND, None, grad_NK, grad_gate_up_EGD, grad_down_EDF, None


def grouped_mlp(
    tokens_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    *,
    precision: OperandPrecision,
) -> Tensor:
    """Runs each token through its experts (SwiGLU, gate rows first) and sums the results by weight."""
    check_runs_grouped_products(tokens_ND.device)
    return _GroupedMlp.apply(  # type: ignore[no-any-return]
        tokens_ND, experts_NK, weights_NK, gate_up_EGD, down_EDF, precision
    )

"""Experts of an MoE layer: sort tokens by expert, one matrix product per expert, gather back.

All products of an expert run before those of the next, so that its rows (about 1 MB at nano) stay
in cache. An expert's rows are filled up to a multiple of 64 with rows of weight zero: oneDNN
compiles a product for each new shape, and row counts differ in every batch.

Shapes: N tokens, K experts per token, E experts, D model width, F inner width of an expert, G = 2F,
P sorted and padded rows, R rows of one expert.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.permutation.op import plan_rows

ROW_QUANTUM = 64


class _ExpertMlp(torch.autograd.Function):
    """Forward and backward of `expert_mlp`."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
    ) -> Tensor:
        num_tokens, top_k = experts_NK.shape
        num_experts, doubled, _ = gate_up_EGD.shape
        plan = plan_rows(experts_NK, num_experts, ROW_QUANTUM)
        ends = [0, *plan.ends_E.tolist()]
        rows_of_expert = [slice(*pair) for pair in pairwise(ends)]
        place_S = plan.place_NK.reshape(-1)
        source_P = plan.source_P[: ends[-1]].clamp(min=0)  # padding reads any token, times 0
        sorted_PD = tokens_ND.index_select(0, source_P)
        scale_P = weights_NK.new_zeros(source_P.numel())
        scale_P[place_S] = weights_NK.reshape(-1)
        inner_PG = tokens_ND.new_empty(source_P.numel(), doubled)
        active_PF = tokens_ND.new_empty(source_P.numel(), doubled // 2)
        output_PD = torch.empty_like(sorted_PD)
        for expert, rows in enumerate(rows_of_expert):
            torch.mm(sorted_PD[rows], gate_up_EGD[expert].T, out=inner_PG[rows])
            gate_RF, up_RF = inner_PG[rows].chunk(2, dim=-1)
            torch.mul(functional.silu(gate_RF), up_RF, out=active_PF[rows])
            torch.mm(active_PF[rows] * scale_P[rows, None], down_EDF[expert].T, out=output_PD[rows])
        ctx.save_for_backward(
            sorted_PD, source_P, place_S, scale_P, inner_PG, active_PF, gate_up_EGD, down_EDF
        )
        ctx.rows_of_expert = rows_of_expert
        ctx.shape = (num_tokens, top_k)
        return output_PD.index_select(0, place_S).unflatten(0, (num_tokens, top_k)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sorted_PD, source_P, place_S, scale_P, inner_PG, active_PF, gate_up_EGD, down_EDF = (
            ctx.saved_tensors
        )
        num_tokens, top_k = ctx.shape
        grad_PD = grad_ND.index_select(0, source_P)
        grad_gate_up_EGD = torch.empty_like(gate_up_EGD)
        grad_down_EDF = torch.empty_like(down_EDF)
        grad_sorted_PD = torch.empty_like(sorted_PD)
        grad_scale_P = torch.empty_like(scale_P)
        for expert, rows in enumerate(ctx.rows_of_expert):
            gate_RF, up_RF = inner_PG[rows].chunk(2, dim=-1)
            active_RF, scale_R1 = active_PF[rows], scale_P[rows, None]
            torch.mm(grad_PD[rows].T, active_RF * scale_R1, out=grad_down_EDF[expert])
            grad_active_RF = grad_PD[rows] @ down_EDF[expert]
            torch.sum(grad_active_RF * active_RF, dim=-1, out=grad_scale_P[rows])
            grad_active_RF.mul_(scale_R1)
            grad_inner_RG = torch.empty_like(inner_PG[rows])
            grad_gate_RF, grad_up_RF = grad_inner_RG.chunk(2, dim=-1)
            torch.mul(grad_active_RF, functional.silu(gate_RF), out=grad_up_RF)
            grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_active_RF.mul_(up_RF), gate_RF))
            torch.mm(grad_inner_RG.T, sorted_PD[rows], out=grad_gate_up_EGD[expert])
            torch.mm(grad_inner_RG, gate_up_EGD[expert], out=grad_sorted_PD[rows])
        placed_SD = grad_sorted_PD.index_select(0, place_S)
        grad_tokens_ND = placed_SD.unflatten(0, (num_tokens, top_k)).sum(1)
        grad_weights_NK = grad_scale_P.index_select(0, place_S).view(num_tokens, top_k)
        return grad_tokens_ND, None, grad_weights_NK, grad_gate_up_EGD, grad_down_EDF


def expert_mlp(
    tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    """Runs each token through its experts (SwiGLU, gate rows first) and sums the results by weight."""
    return _ExpertMlp.apply(tokens_ND, experts_NK, weights_NK, gate_up_EGD, down_EDF)  # type: ignore[no-any-return]

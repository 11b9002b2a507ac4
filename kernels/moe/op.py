"""Experts of a mixture-of-experts layer: sort tokens by expert, one matrix product an expert, gather back.

Owns the contract and the CPU path of `expert_mlp`, with a hand-written backward. Enters: tokens, each token's experts and
their weights, and the stacked expert matrices. Leaves: the weighted sum of the experts' outputs, differentiable in tokens,
weights and matrices. It does not choose experts and holds no parameters.

Each expert is taken through all its products before the next one, so that its rows (about 1 MB at nano) stay in cache: in fp32
this beat batched products over padded capacity and torch's grouped product.

Shapes: N tokens, K experts a token, E experts, D model width, F inner width of an expert, G = 2F, S = N*K sorted rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _ExpertMlp(torch.autograd.Function):
    """Forward and backward of `expert_mlp`."""

    @staticmethod
    def forward(
        ctx: Any, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        num_tokens, top_k = experts_NK.shape
        num_experts, doubled, _ = gate_up_EGD.shape
        flat_S = experts_NK.reshape(-1)
        order_S = torch.argsort(flat_S, stable=True)
        counts = torch.bincount(flat_S, minlength=num_experts).tolist()
        source_S = torch.div(order_S, top_k, rounding_mode="floor")
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
        sorted_SD = tokens_ND.index_select(0, source_S)
        scale_S = weights_NK.reshape(-1).index_select(0, order_S)
        inner_SG = tokens_ND.new_empty(order_S.numel(), doubled)
        active_SF = tokens_ND.new_empty(order_S.numel(), doubled // 2)
        output_SD = torch.empty_like(sorted_SD)
        start = 0
        for expert, count in enumerate(counts):
            rows = slice(start, start + count)
            torch.mm(sorted_SD[rows], gate_up_EGD[expert].T, out=inner_SG[rows])
            gate_RF, up_RF = inner_SG[rows].chunk(2, dim=-1)
            torch.mul(functional.silu(gate_RF), up_RF, out=active_SF[rows])
            torch.mm(active_SF[rows] * scale_S[rows, None], down_EDF[expert].T, out=output_SD[rows])
            start += count
        ctx.save_for_backward(sorted_SD, source_S, place_S, scale_S, inner_SG, active_SF, gate_up_EGD, down_EDF)
        ctx.counts = counts
        ctx.shape = (num_tokens, top_k)
        return output_SD.index_select(0, place_S).view(num_tokens, top_k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sorted_SD, source_S, place_S, scale_S, inner_SG, active_SF, gate_up_EGD, down_EDF = ctx.saved_tensors
        num_tokens, top_k = ctx.shape
        grad_SD = grad_ND.index_select(0, source_S)
        grad_gate_up_EGD = torch.zeros_like(gate_up_EGD)
        grad_down_EDF = torch.zeros_like(down_EDF)
        grad_sorted_SD = torch.empty_like(sorted_SD)
        grad_scale_S = torch.empty_like(scale_S)
        start = 0
        for expert, count in enumerate(ctx.counts):
            if count == 0:
                continue
            rows = slice(start, start + count)
            start += count
            gate_RF, up_RF = inner_SG[rows].chunk(2, dim=-1)
            active_RF, scale_R1 = active_SF[rows], scale_S[rows, None]
            torch.mm(grad_SD[rows].T, active_RF * scale_R1, out=grad_down_EDF[expert])
            grad_active_RF = grad_SD[rows] @ down_EDF[expert]
            torch.sum(grad_active_RF * active_RF, dim=-1, out=grad_scale_S[rows])
            grad_active_RF.mul_(scale_R1)
            grad_inner_RG = torch.empty_like(inner_SG[rows])
            grad_gate_RF, grad_up_RF = grad_inner_RG.chunk(2, dim=-1)
            torch.mul(grad_active_RF, functional.silu(gate_RF), out=grad_up_RF)
            grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_active_RF.mul_(up_RF), gate_RF))
            torch.mm(grad_inner_RG.T, sorted_SD[rows], out=grad_gate_up_EGD[expert])
            torch.mm(grad_inner_RG, gate_up_EGD[expert], out=grad_sorted_SD[rows])
        grad_tokens_ND = grad_sorted_SD.index_select(0, place_S).view(num_tokens, top_k, -1).sum(1)
        grad_weights_NK = grad_scale_S.index_select(0, place_S).view(num_tokens, top_k)
        return grad_tokens_ND, None, grad_weights_NK, grad_gate_up_EGD, grad_down_EDF


def expert_mlp(
    tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    """Runs each token through its experts (SwiGLU, gate rows first) and sums the results by weight."""
    return _ExpertMlp.apply(tokens_ND, experts_NK, weights_NK, gate_up_EGD, down_EDF)  # type: ignore[no-any-return]

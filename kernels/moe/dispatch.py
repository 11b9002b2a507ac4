"""Brings tokens to the rows of their experts and sums results back.

`LocalDispatcher`, for experts that all live in one process, and `Dispatched`, what any dispatcher
gives the experts. Tokens are rounded before they are copied: a block lies within a token, so the
result is the same, and K times less is rounded (between processes, half as many bytes are sent).
Results come back in the plain dtype.

Shapes: N tokens, K experts per token, E experts, D model width, P rows.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ostinato.kernels.grouped_gemm.op import Operand
from ostinato.kernels.moe.precision import Precision
from ostinato.kernels.mxfp8.formats import MxTensor
from ostinato.kernels.permutation.op import RowPlan, permute, plan_rows, unpermute


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows by expert, and the way back."""

    rows: Operand
    scale_P: Tensor
    """Routing weight of each row; 0 for padding."""
    plan: RowPlan

    @property
    def ends_E(self) -> Tensor:
        """The row after each expert's last."""
        return self.plan.ends_E


class Dispatcher(Protocol):
    """Moves tokens to experts and back. `gather` and `combine` are adjoint to each other."""

    def dispatch(
        self, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, precision: Precision
    ) -> Dispatched:
        """Rounds tokens and lays them out by expert."""
        ...

    def gather(self, tokens_ND: Tensor, plan: RowPlan) -> Tensor:
        """Lays plain tokens out as `dispatch` did."""
        ...

    def combine(self, rows_PD: Tensor, plan: RowPlan) -> Tensor:
        """Sums each token's rows, in fp32 or better."""
        ...

    def combine_scales(self, scale_P: Tensor, plan: RowPlan) -> Tensor:
        """Brings one number per row back to weights_NK."""
        ...


class LocalDispatcher:
    """All experts in this process: a permutation."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, precision: Precision
    ) -> Dispatched:
        """Rounds tokens and lays them out by expert."""
        plan = plan_rows(experts_NK, self.num_experts, precision.row_align)
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

    def gather(self, tokens_ND: Tensor, plan: RowPlan) -> Tensor:
        """Lays plain tokens out as `dispatch` did."""
        return permute(tokens_ND, plan)

    def combine(self, rows_PD: Tensor, plan: RowPlan) -> Tensor:
        """Sums each token's rows in slot order, in fp32 or better."""
        return unpermute(rows_PD, plan)

    def combine_scales(self, scale_P: Tensor, plan: RowPlan) -> Tensor:
        """Brings one number per row back to weights_NK."""
        return scale_P.index_select(0, plan.place_NK.flatten()).view(plan.place_NK.shape)

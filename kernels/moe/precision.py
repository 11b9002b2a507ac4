"""Precision of the operands of experts' products: plain, or MXFP8 in blocks of 32 or 128 (kernels/README.md).

`OperandPrecision` rounds activations, gradients and weights for a product and makes the copies that
the backward pass needs. The rounding has two backends: `emulated` keeps the rounded numbers in
bf16, the other stores MXFP8 for the kernels that read it.

In mx128 weight gradients contract rows, so they read transposed copies in (1, 128), whose groups must
not cross experts: experts' rows are filled up to a multiple of 128.

Shapes: P rows, K width of a row, E experts, N and K of a weight.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ostinato.kernels.grouped_gemm.op import Operand
from ostinato.kernels.mxfp8.formats import MxTensor
from ostinato.kernels.mxfp8.op import (
    dequantize,
    fake_quantize,
    quantize,
    quantize_row_col,
    transpose,
)

PrecisionName = Literal["fp32", "bf16", "mx32", "mx128"]
# oneDNN compiles a product for each new number of rows
CPU_ROW_QUANTUM = 64
GROUP = {"mx32": 32, "mx128": 128}


@dataclass(frozen=True, slots=True)
class OperandPrecision:
    """Rounding and storage of the experts' operands."""

    dtype: torch.dtype
    """Number format of plain rows and of products."""
    group: int | None
    """Elements that share a scale along the contracted dimension; None: not quantized."""
    emulated: bool
    """Whether quantized operands are kept as the numbers that they represent."""

    @property
    def row_align(self) -> int:
        """An expert's rows are filled up to a multiple of it."""
        return max(CPU_ROW_QUANTUM, self.group or 0) if self.emulated else 128

    @property
    def has_two_copies(self) -> bool:
        """Whether weight gradients read other copies than the products."""
        return self.group == GROUP["mx128"]

    def round_rows(self, rows_PK: Tensor) -> Operand:
        """Rounds rows for a product that contracts the columns."""
        rows_PK = rows_PK.to(self.dtype)
        if self.group is None:
            return rows_PK
        block = (1, self.group)
        return fake_quantize(rows_PK, block) if self.emulated else quantize(rows_PK, block)

    def round_both(self, rows_PK: Tensor) -> tuple[Operand, Operand]:
        """Copies for a product over columns, and for a weight gradient, over rows."""
        if not self.has_two_copies:
            rounded = self.round_rows(rows_PK)
            return rounded, rounded
        if self.emulated:
            return self.round_rows(rows_PK), self.round_for_wgrad(rows_PK)
        return quantize_row_col(rows_PK.to(self.dtype), GROUP["mx128"])

    def round_for_wgrad(self, rows_PK: Tensor) -> Operand:
        """Rounds rows for a weight gradient, which contracts the rows."""
        if not self.has_two_copies:
            return self.round_rows(rows_PK)
        block = (GROUP["mx128"], 1)
        if self.emulated:
            return fake_quantize(rows_PK.to(self.dtype), block)
        return transpose(quantize(rows_PK.to(self.dtype), block))

    def recopy_for_wgrad(self, rows: Operand) -> Operand:
        """Weight-gradient copy of dispatched rows, which exist only rounded along columns."""
        if not self.has_two_copies:
            return rows
        return self.round_for_wgrad(dequantize(rows) if isinstance(rows, MxTensor) else rows)

    def round_weights(self, weights_ENK: Tensor) -> Operand:
        """Rounds weights for products that contract K, and N in the backward pass."""
        weights_ENK = weights_ENK.to(self.dtype)
        if self.group is None:
            return weights_ENK
        block = (self.group if self.has_two_copies else 1, self.group)
        return fake_quantize(weights_ENK, block) if self.emulated else quantize(weights_ENK, block)


def find_precision(name: PrecisionName, device: torch.device) -> OperandPrecision:
    """The precision of a recipe on a device. MXFP8 is emulated except on CUDA."""
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    return OperandPrecision(dtype, GROUP.get(name), device.type != "cuda")

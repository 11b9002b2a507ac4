"""One matrix product per expert, over rows laid out by expert.

`grouped_mm` (fprop, and dgrad with the weights transposed) and `grouped_wgrad` for plain and
quantized operands, and their CPU paths. Rows after the last expert's are not written.

Quantized operands in 32-blocks are converted to bf16, which is exact, before the product. The scales of
quantized operands must run along the contracted dimension; weight gradients contract rows, so in
128-blocks `grouped_wgrad` takes transposed copies.

Shapes: P rows, E experts, N and K the width of a row after and before a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels.mxfp8.formats import MxTensor
from ostinato.kernels.mxfp8.op import dequantize, dequantize_op, transpose
from ostinato.kernels.operation import Operation

WIDE_GROUP = 128
# torch's grouped product needs rows that start at multiples of it
ALIGNED_BYTES = 16


def _fits_torch(*operands: Tensor) -> bool:
    return all(
        operand.dtype in (torch.bfloat16, torch.float32)
        and operand.shape[-1] * operand.element_size() % ALIGNED_BYTES == 0
        and operand.shape[-2] * operand.element_size() % ALIGNED_BYTES == 0
        for operand in operands
    )


@Operation
def grouped_mm_op(rows_PK: Tensor, weights_ENK: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """rows @ weights.T by expert. With `transposed`, rows_PN @ weights_ENK."""
    right = weights_ENK if transposed else weights_ENK.transpose(1, 2)
    if _fits_torch(rows_PK, weights_ENK) and int(ends_E[-1]) == rows_PK.shape[0]:
        return F.grouped_mm(rows_PK, right, offs=ends_E)
    out = rows_PK.new_zeros(rows_PK.shape[0], right.shape[2])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        torch.mm(rows_PK[start:end], right[expert], out=out[start:end])
        start = end
    return out


@Operation
def grouped_wgrad_op(grads_PN: Tensor, rows_PK: Tensor, ends_E: Tensor) -> Tensor:
    """grads.T @ rows by expert. Zeros for an expert without rows."""
    out = rows_PK.new_zeros(ends_E.numel(), grads_PN.shape[1], rows_PK.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(grads_PN[start:end].T, rows_PK[start:end], out=out[expert])
        start = end
    return out


@Operation
def grouped_mm_mx128_op(
    rows_PK: Tensor, row_scales: Tensor, weights_ENK: Tensor, weight_scales: Tensor, ends_E: Tensor
) -> Tensor:
    """(1, 128) rows times (128, 128) weights transposed, in bf16."""
    rows = dequantize_op(rows_PK, row_scales, 1, WIDE_GROUP, torch.bfloat16)
    weights = dequantize_op(weights_ENK, weight_scales, WIDE_GROUP, WIDE_GROUP, torch.bfloat16)
    return grouped_mm_op(rows, weights, ends_E, False)


@Operation
def grouped_wgrad_mx128_op(
    grads_NP: Tensor, grad_scales: Tensor, rows_KP: Tensor, row_scales: Tensor, ends_E: Tensor
) -> Tensor:
    """Transposed (1, 128) copies, contracted along rows, in bf16."""
    grads = dequantize_op(grads_NP, grad_scales, 1, WIDE_GROUP, torch.bfloat16)
    rows = dequantize_op(rows_KP, row_scales, 1, WIDE_GROUP, torch.bfloat16)
    return grouped_wgrad_op(grads.T.contiguous(), rows.T.contiguous(), ends_E)


Operand = Tensor | MxTensor


def _plain(operand: Operand) -> Tensor:
    return dequantize(operand) if isinstance(operand, MxTensor) else operand


def grouped_mm(
    rows: Operand, weights: Operand, ends_E: Tensor, *, transposed: bool = False
) -> Tensor:
    """out_PN = rows_PK @ weights_ENK.T by expert. `transposed`: out_PK = rows_PN @ weights_ENK."""
    if isinstance(rows, MxTensor):
        rows.check_contracted_along_rows()
        if isinstance(weights, MxTensor) and rows.block == (1, WIDE_GROUP):
            if weights.block != (WIDE_GROUP, WIDE_GROUP):
                raise ValueError(
                    f"weights have blocks of {weights.block}, wanted {(WIDE_GROUP, WIDE_GROUP)} "
                    f"for rows in blocks of {rows.block}"
                )
            if transposed:
                weights = transpose(weights)
            return grouped_mm_mx128_op(
                rows.values, rows.scales, weights.values, weights.scales, ends_E
            )
    return grouped_mm_op(_plain(rows), _plain(weights), ends_E, transposed)


def grouped_wgrad(grads: Operand, rows: Operand, ends_E: Tensor) -> Tensor:
    """Returns grads_ENK = grads_PN.T @ rows_PK by expert.

    In 128-blocks both are transposed copies, grads_NP and rows_KP.
    """
    if isinstance(grads, MxTensor) and isinstance(rows, MxTensor):
        if grads.block != rows.block:
            raise ValueError(f"blocks are {grads.block} and {rows.block}, wanted equal blocks")
        if grads.block == (1, WIDE_GROUP):
            return grouped_wgrad_mx128_op(
                grads.values, grads.scales, rows.values, rows.scales, ends_E
            )
    return grouped_wgrad_op(_plain(grads), _plain(rows), ends_E)

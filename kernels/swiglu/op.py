"""The weighted SwiGLU between an expert's two products, forward and backward, and with quantizing.

The contracts `swiglu`, `swiglu_backward` and their quantizing forms, CPU paths and custom ops.

Arithmetic is fp32 (fp64 for fp64 inputs) and rounds once to the rows' dtype; quantizing reads the
rounded rows, so fused and unfused give the same bytes.

Shapes: P rows, F inner width, G = 2F.
"""

import torch
from torch import Tensor

from ostinato.kernels.mxfp8.formats import FP8, MxTensor
from ostinato.kernels.mxfp8.op import quantize_op, quantize_row_col_op
from ostinato.kernels.operation import operation


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _swiglu_shapes(inner_PG: Tensor, scale_P: Tensor) -> Tensor:
    return inner_PG.new_empty(inner_PG.shape[0], inner_PG.shape[1] // 2)


@operation("swiglu", _swiglu_shapes)
def swiglu_op(inner_PG: Tensor, scale_P: Tensor) -> Tensor:
    """See `swiglu`."""
    gate_PF, up_PF = _wide(inner_PG).chunk(2, dim=-1)
    active_PF = torch.nn.functional.silu(gate_PF).mul_(up_PF)
    return active_PF.mul_(scale_P[:, None]).to(inner_PG.dtype)


def _swiglu_backward_shapes(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(inner_PG), torch.empty_like(scale_P), torch.empty_like(grad_PF)


@operation("swiglu_backward", _swiglu_backward_shapes)
def swiglu_backward_op(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `swiglu_backward`."""
    grad, (gate_PF, up_PF) = _wide(grad_PF), _wide(inner_PG).chunk(2, dim=-1)
    silu_PF = torch.nn.functional.silu(gate_PF)
    plain_PF = silu_PF * up_PF
    grad_scale_P = torch.linalg.vecdot(grad, plain_PF).to(scale_P.dtype)
    active_PF = plain_PF.mul_(scale_P[:, None]).to(inner_PG.dtype)
    grad = grad * scale_P[:, None]
    grad_inner_PG = torch.empty_like(inner_PG)
    grad_gate_PF, grad_up_PF = grad_inner_PG.chunk(2, dim=-1)
    grad_up_PF.copy_(silu_PF.mul_(grad))
    grad_gate_PF.copy_(torch.ops.aten.silu_backward(grad.mul_(up_PF), gate_PF))
    return grad_inner_PG, grad_scale_P, active_PF


def _swiglu_quantize_shapes(inner_PG: Tensor, scale_P: Tensor, group: int) -> tuple[Tensor, Tensor]:
    rows, inner = inner_PG.shape[0], inner_PG.shape[1] // 2
    return (
        inner_PG.new_empty((rows, inner), dtype=FP8),
        inner_PG.new_empty((rows, -(-inner // group)), dtype=torch.uint8),
    )


@operation("swiglu_quantize", _swiglu_quantize_shapes)
def swiglu_quantize_op(inner_PG: Tensor, scale_P: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """See `swiglu_quantize`."""
    return quantize_op(swiglu_op(inner_PG, scale_P), 1, group, "rceil")


def _swiglu_backward_quantize_shapes(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, doubled = inner_PG.shape
    along_rows = -(-rows // group)
    return (
        inner_PG.new_empty((rows, doubled), dtype=FP8),
        inner_PG.new_empty((rows, -(-doubled // group)), dtype=torch.uint8),
        inner_PG.new_empty((doubled, rows), dtype=FP8),
        inner_PG.new_empty((doubled, along_rows), dtype=torch.uint8),
        torch.empty_like(scale_P),
        inner_PG.new_empty((doubled // 2, rows), dtype=FP8),
        inner_PG.new_empty((doubled // 2, along_rows), dtype=torch.uint8),
    )


@operation("swiglu_backward_quantize", _swiglu_backward_quantize_shapes)
def swiglu_backward_quantize_op(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Row and transposed copies of the inner gradient, the scale's gradient, and the transposed copy
    of the recomputed rows.
    """
    grad_inner_PG, grad_scale_P, active_PF = swiglu_backward_op(grad_PF, inner_PG, scale_P)
    return (
        *quantize_row_col_op(grad_inner_PG, group),
        grad_scale_P,
        *quantize_op(active_PF.T.contiguous(), 1, group, "rceil"),
    )


def swiglu(inner_PG: Tensor, scale_P: Tensor) -> Tensor:
    """Returns active_PF = scale * silu(gate) * up."""
    return swiglu_op(inner_PG, scale_P)


def swiglu_backward(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (grad_inner_PG, grad_scale_P, active_PF) for the gradient of `swiglu`'s result."""
    return swiglu_backward_op(grad_PF, inner_PG, scale_P)


def swiglu_quantize(inner_PG: Tensor, scale_P: Tensor, group: int) -> MxTensor:
    """`quantize(swiglu(inner_PG, scale_P), (1, group))` without the bf16 rows in memory."""
    values, scales = swiglu_quantize_op(inner_PG, scale_P, group)
    return MxTensor(values, scales, (1, group))

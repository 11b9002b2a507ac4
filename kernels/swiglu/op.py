"""The weighted SwiGLU between an expert's two products, forward and backward, optionally quantized.

Arithmetic is fp32 (fp64 for fp64 inputs) and rounds once to the rows' dtype. Quantizing reads the
rounded rows, so fused and unfused paths give the same bytes.

Shapes: P rows, F inner width, G = 2F.
"""

import torch
from torch import Tensor

from ostinato.kernels.mxfp8.formats import MxTensor
from ostinato.kernels.mxfp8.op import quantize_op
from ostinato.kernels.operation import Operation


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@Operation
def swiglu(inner_PG: Tensor, scale_P: Tensor) -> Tensor:
    """Returns active_PF = scale * silu(gate) * up."""
    gate_PF, up_PF = _wide(inner_PG).chunk(2, dim=-1)
    active_PF = torch.nn.functional.silu(gate_PF).mul_(up_PF)
    return active_PF.mul_(scale_P[:, None]).to(inner_PG.dtype)


@Operation
def swiglu_backward(
    grad_PF: Tensor, inner_PG: Tensor, scale_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (grad_inner_PG, grad_scale_P, active_PF) for the gradient of `swiglu`'s result."""
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


@Operation
def swiglu_quantize_op(inner_PG: Tensor, scale_P: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """See `swiglu_quantize`."""
    return quantize_op(swiglu(inner_PG, scale_P), 1, group)


def swiglu_quantize(inner_PG: Tensor, scale_P: Tensor, group: int) -> MxTensor:
    """`quantize(swiglu(inner_PG, scale_P), (1, group))` without the bf16 rows in memory."""
    values, scales = swiglu_quantize_op(inner_PG, scale_P, group)
    return MxTensor(values, scales, (1, group))

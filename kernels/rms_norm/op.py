"""Root-mean-square normalisation for training on a CPU."""

from typing import Any

import torch
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """Forward and backward of `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        width = hidden.shape[-1]
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        inverse = norm.square_().mul_(1 / width).add_(epsilon).rsqrt_()
        scaled = hidden * inverse
        ctx.save_for_backward(scaled, inverse, weight)
        return scaled * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        scaled, inverse, weight = ctx.saved_tensors
        width = scaled.shape[-1]
        product = (grad * scaled).reshape(-1, width)
        along = torch.mv(product, weight).mul_(1 / width).view(inverse.shape)
        grad_hidden = torch.addcmul(grad * weight, scaled, along, value=-1).mul_(inverse)
        return grad_hidden, product.sum(0), None


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scales the last dimension to mean square 1, then by `weight`."""
    return _RmsNorm.apply(hidden, weight, epsilon)  # type: ignore[no-any-return]

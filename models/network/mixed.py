"""Mixed precision: except with fp32, a GPU multiplies in bf16 by torch's autocast (decision 0019).

Weights, norms, the residual stream, router and optimiser stay fp32. Experts and routers choose
their own precision, so they leave the context.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from ostinato.kernels.operation import autocast_dtype
from ostinato.models.device import current_device


def is_mixed(precision: str, engine: str | None) -> bool:
    """Whether attention, dense matrices and the head multiply in bf16: on a GPU in every precision
    except fp32, and in Transformer Engine's modules. A CPU keeps them in fp32.
    """
    return engine is not None or (precision != "fp32" and current_device().type == "cuda")


def mixed_context(mixed: bool) -> AbstractContextManager[Any]:
    """Makes a mixed model multiply in bf16. Transformer Engine's modules quantise further, to FP8."""
    if not mixed:
        return contextlib.nullcontext()
    return torch.autocast(current_device().type, torch.bfloat16)


def plain_context() -> AbstractContextManager[Any]:
    """Turns `mixed_context` off."""
    device = current_device().type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def to_product_dtype(operand: Tensor) -> Tensor:
    """The operand in the dtype of products in this context."""
    return operand.to(autocast_dtype(operand.device) or operand.dtype)


class ColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel layer with its input cast to the products' dtype first. The layer
    keeps it for backward, where sequence parallelism sums gradients in its dtype.
    """

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> Any:
        """Megatron's output, from the cast input."""
        return super().forward(to_product_dtype(input_), *args, **options)

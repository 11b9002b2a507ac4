"""Mixed precision: in every recipe but fp32 a GPU multiplies in bf16, by torch's autocast (decision 0125).

Weights, norms, residuals, router and optimiser stay fp32, and what a layer's products give is summed in fp32.
Modules that choose their own precision, experts and routers, leave the context.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from ostinato.models.device import current_device


def is_mixed(precision: str, engine: str | None) -> bool:
    """Whether attention, dense matrices and the head multiply in bf16, as experts do: on a GPU in every precision
    but fp32, and in Transformer Engine's modules. A CPU gains little and keeps them in fp32.
    """
    return engine is not None or (precision != "fp32" and current_device().type == "cuda")


def mixed_context(mixed: bool) -> AbstractContextManager[Any]:
    """Makes products of a mixed model compute in bf16, those of Transformer Engine's modules in FP8 from it."""
    if not mixed:
        return contextlib.nullcontext()
    return torch.autocast(current_device().type, torch.bfloat16)


def plain_context() -> AbstractContextManager[Any]:
    """Takes `mixed_context` back."""
    device = current_device().type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def to_product_dtype(operand: Tensor) -> Tensor:
    """The operand as products in this context read it."""
    device = operand.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return operand.to(torch.get_autocast_dtype(device))
    return operand


class ColumnLinear(ColumnParallelLinear):
    """Megatron's, which keeps its input for backward as it comes, and under sequence parallelism sums gradients into
    a buffer of that dtype.
    """

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> Any:
        """As Megatron's."""
        return super().forward(to_product_dtype(input_), *args, **options)

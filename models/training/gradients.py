"""Gradients of all ranks, summed by Megatron, and their norm.

Megatron's own norm wants a CUDA device, so it is taken here.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.network.parallel.shards import find_cut
from ostinato.models.network.parallel.stages import is_copy, pipeline_group


class LayoutGradients:
    """Gradients of a model under the layout of the open process groups."""

    def __init__(self, model: TrainerModel) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        # Megatron looks for the two ends of a pipeline in the first and the last of them.
        self.wrapped: list[Any] = [
            DistributedDataParallel(model.trunk.config, config, module)
            for module in (*model.chunks, model.draft, model.adapters)
            if any(parameter.requires_grad for parameter in module.parameters())
        ]

    def clear(self) -> None:
        """Zeroes what was accumulated."""
        for one in self.wrapped:
            one.zero_grad_buffer()
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Sums over all ranks that hold the same parameter and hands the optimiser the sums."""
        finalize_model_grads(self.wrapped)
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's buffer

    def scale(self, factor: float) -> None:
        """Multiplies every gradient."""
        for one in self.wrapped:
            one.scale_gradients(factor)

    def clip(self, largest_norm: float | None) -> float:
        """Scales gradients down to `largest_norm` (None: never). Returns their norm before, the same
        on every rank and in every layout.
        """
        whole = torch.zeros((), dtype=torch.float64, device=current_device())
        cut_over: dict[dist.ProcessGroup, Tensor] = {}
        for parameter in self.parameters:
            if is_copy(parameter):
                continue
            gradient: Any = parameter.grad
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            cut = find_cut(parameter)
            if cut is None:
                whole += square
            elif cut.group in cut_over:
                cut_over[cut.group] += square
            else:
                cut_over[cut.group] = square
        for group, square in cut_over.items():
            dist.all_reduce(square, group=group)
            whole += square
        if pipeline_group().size() > 1:
            dist.all_reduce(whole, group=pipeline_group())
        norm = math.sqrt(whole)
        if largest_norm is not None and norm > largest_norm:
            self.scale(largest_norm / norm)
        return norm

"""Gradients of all ranks, summed by Megatron, and their norm.

Megatron's own norm allocates on CUDA, so this file takes it.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from ostinato.models.network.build import TrainerModel
from ostinato.models.network.shards import find_cut, is_expert


class LayoutGradients:
    """Gradients of a model under the layout of the open process groups."""

    def __init__(self, model: TrainerModel) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.wrapped = DistributedDataParallel(model.trunk.config, config, model)

    def clear(self) -> None:
        """Zeroes what was accumulated."""
        self.wrapped.zero_grad_buffer()
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Sums over all ranks that hold the same parameter and hands the optimiser the sums."""
        finalize_model_grads([self.wrapped])
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's buffer

    def scale(self, factor: float) -> None:
        """Multiplies every gradient."""
        self.wrapped.scale_gradients(factor)

    def clip(self, largest_norm: float | None) -> float:
        """Scales gradients down to `largest_norm` (None: never). Returns their norm before, the same
        on every rank and in every layout."""
        shared, cut, experts = torch.zeros(3, 1, dtype=torch.float64)
        for parameter in self.parameters:
            kind = (
                experts if is_expert(parameter) else shared if find_cut(parameter) is None else cut
            )
            kind += _square(parameter)
        dist.all_reduce(cut, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(experts, group=parallel_state.get_expert_model_parallel_group())
        norm = float((shared + cut + experts).sqrt())
        if largest_norm is not None and norm > largest_norm:
            self.scale(largest_norm / norm)
        return norm


def _square(parameter: Tensor) -> float:
    assert parameter.grad is not None
    return float(parameter.grad.norm()) ** 2

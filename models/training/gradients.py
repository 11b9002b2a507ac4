"""Gradients of all ranks, summed by Megatron, and their norm.

The norm is computed here, since Megatron's needs a CUDA device.
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
from ostinato.models.network.parallel.shards import find_cuts
from ostinato.models.network.parallel.stages import is_copy, pipeline_group


class LayoutGradients:
    """Gradients of a model under the layout of the open process groups."""

    def __init__(self, model: TrainerModel) -> None:
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)

        def wrap(*modules: torch.nn.Module) -> list[Any]:
            return [
                DistributedDataParallel(model.trunk.config, config, module)
                for module in modules
                if any(parameter.requires_grad for parameter in module.parameters())
            ]

        # Megatron expects the two ends of a pipeline in the first and the last module.
        trunk, drafts = wrap(*model.chunks, model.adapters), wrap(model.draft)
        self.wrapped = [*trunk, *drafts]
        self.parts = [part for part in (trunk, drafts) if part]
        self.parameters = [parameter for part in self.parts for parameter in _trained(part)]

    def clear(self) -> None:
        """Sets all gradients to zero."""
        for one in self.wrapped:
            one.zero_grad_buffer()
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Sums gradients over all ranks that hold the same parameter, for the optimiser."""
        finalize_model_grads(self.wrapped)
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's buffer

    def scale(self, factor: float) -> None:
        """Multiplies every gradient."""
        for one in self.wrapped:
            one.scale_gradients(factor)

    def clip(self, largest_norm: float | None) -> float:
        """Scales the gradients of the trunk, and separately those of draft layers, down to
        `largest_norm` (None: never), so that drafts do not slow a trunk that learns with them.
        Returns the trunk's norm before scaling, or that of the drafts if only they learn. It is
        equal on every rank and in every layout, and not finite if either norm is not.
        """
        norms = [self._norm(part) for part in self.parts]
        for part, norm in zip(self.parts, norms, strict=True):
            if largest_norm is not None and norm > largest_norm:
                for one in part:
                    one.scale_gradients(largest_norm / norm)
        return next((norm for norm in norms if not math.isfinite(norm)), norms[0])

    def _norm(self, part: list[Any]) -> float:
        whole = torch.zeros((), dtype=torch.float64, device=current_device())
        cut_over: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
        for parameter in _trained(part):
            if is_copy(parameter):
                continue
            gradient: Any = parameter.grad
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            groups = tuple(cut.group for cut in find_cuts(parameter))
            if groups in cut_over:
                cut_over[groups] += square
            else:
                cut_over[groups] = square
        for groups, square in cut_over.items():
            for group in groups:
                dist.all_reduce(square, group=group)
            whole += square
        if pipeline_group().size() > 1:
            dist.all_reduce(whole, group=pipeline_group())
        return math.sqrt(whole)


def _trained(part: list[Any]) -> list[torch.nn.Parameter]:
    return [weight for one in part for weight in one.parameters() if weight.requires_grad]

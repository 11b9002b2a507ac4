"""Optimiser: Muon for matrices, AdamW for the rest.

It neither clips nor schedules. Callers set `lr` in the groups; a group's `kind` determines which of
the two rates applies.

Muon replaces the momentum of each matrix by the nearest orthogonal matrix (`newton_schulz.py`) and scales
it by 0.2 * sqrt(longer side), so that its updates are as large as AdamW's (arXiv 2502.16982). An expert is
one matrix, and so is each head's query, key and value. A matrix that is sharded over ranks is gathered
first, except for heads, which stay whole. Ranks that hold the same matrices divide the products. AdamW's
state is sharded over data-parallel ranks (`sharded_adamw.py`), Muon's momentum is not.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from ostinato.models.device import current_device, newton_schulz_dtype
from ostinato.models.network.build import TrainerModel
from ostinato.models.network.parallel.shards import (
    gather_whole,
    head_rows,
    local_shard,
    matrix_cuts,
    replica_group,
    sharded_parts,
)
from ostinato.models.network.parallel.stages import pipeline_group
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.newton_schulz import orthogonalise_all
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.models.training.sharded_adamw import ShardedAdamW

UPDATE_SCALE = 0.2
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
# Parameters without Muon: matrices whose rows are looked up or scored one by one rather than used
# as a linear map, and the two thin halves of an adapter.
NOT_MAPS = ("word_embeddings", "output_layer", "router", "adapters")


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum. Parameters are matrices or stacks of them."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(
            parameters,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "kind": "muon"},
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            by_holders: dict[dist.ProcessGroup | None, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_holders.setdefault(replica_group(parameter), []).append(parameter)
            for holders, parameters in by_holders.items():
                self._step_together(group, parameters, holders)

    def _step_together(
        self, group: dict[str, Any], parameters: list[Tensor], holders: dist.ProcessGroup | None
    ) -> None:
        """Updates parameters that the same ranks hold."""
        updates = [
            gather_whole(self._update(group, parameter), matrix_cuts(parameter))
            for parameter in parameters
        ]
        stacks = [
            _matrices(update, head_rows(parameter))
            for parameter, update in zip(parameters, updates, strict=True)
        ]
        dtype = newton_schulz_dtype(current_device())
        results = iter(orthogonalise_all([one for each in stacks for one in each], dtype, holders))
        for parameter, update, each in zip(parameters, updates, stacks, strict=True):
            scaled = [UPDATE_SCALE * max(one.shape[-2:]) ** 0.5 * next(results) for one in each]
            whole = torch.cat(scaled, dim=1).reshape(update.shape)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(local_shard(whole, matrix_cuts(parameter)), alpha=group["lr"])

    def _update(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Adds the gradient to the momentum. Returns the Nesterov update."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"])


def _matrices(update: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Stacks [M, R, C] of the matrices to orthogonalise. With `rows`, one stack per projection of a head."""
    columns = update.shape[-1]
    if rows:
        return update.view(-1, sum(rows), columns).split(rows, 1)
    return (update.view(-1, update.shape[-2], columns),)


class ShardState(NamedTuple):
    """One tensor of the optimiser's state on this rank."""

    kind: str
    parameter: Tensor
    tensor: Tensor
    is_owned: bool  # other ranks with the same part of the parameter lack this tensor


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimisers over disjoint parameters, used as one."""

    def __init__(self, parts: dict[str, Muon | ShardedAdamW]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts. Changing `lr` in one changes the part."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps every part."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every part."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def states(self) -> Iterator[ShardState]:
        """Yields the state on this rank. A tensor of elements is sharded like its parameter."""
        for name, part in self.parts.items():
            for parameter, values in part.state.items():
                for kind, value in values.items():
                    key = f"optimizer.{name}.{kind}"
                    yield ShardState(key, parameter, value, isinstance(part, ShardedAdamW))


def sharded_state(
    model: TrainerModel, optimizer: CombinedOptimizer, weights: Mapping[str, Tensor]
) -> list[ShardedTensor]:
    """This rank's parts of the weights and of the optimiser's state, for Megatron's checkpoints."""
    names = {id(weight): name for name, weight in model.moving_tensors().items()}
    earlier = _names_of_earlier_stages(list(names.values()))
    parts = []
    held = [ShardState("model", weight, weight, False) for weight in weights.values()]
    for one in held + list(optimizer.states()):
        name = names[id(one.parameter)]
        copy = sum(name in stage for stage in earlier)
        parts += sharded_parts(
            f"{one.kind}.{name}", one.tensor, one.parameter, copy, is_owned=one.is_owned
        )
    return parts


def _names_of_earlier_stages(names: list[str]) -> list[list[str]]:
    """Names of weights on the pipeline stages before this one."""
    group = pipeline_group()
    if group.size() == 1:
        return []
    stages: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(stages, names, group=group)
    return stages[: group.rank()]


def allocate_state(optimizer: CombinedOptimizer, gradients: LayoutGradients) -> None:
    """Makes the optimiser allocate its state, by a step with zero gradients. The step decays the
    weights: load them afterwards.
    """
    gradients.clear()
    gradients.reduce()
    optimizer.step()


def build_optimizer(
    model: TrainerModel, config: OptimizerConfig, *, muon: float = 0.02, adam: float = 4e-3
) -> CombinedOptimizer:
    """Builds the optimiser over all parameters of `model` that require a gradient. `muon` and
    `adam` are the rates until `set_learning_rates`, which training loops call before every step.
    """
    maps: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_map = parameter.ndim >= 2 and not any(part in name for part in NOT_MAPS)
            (maps if is_map and config.kind == "muon" else others).append(parameter)
    parts: dict[str, Muon | ShardedAdamW] = {}
    if maps:
        parts["muon"] = Muon(maps, muon, MUON_MOMENTUM, config.weight_decay)
    if others:
        parts["adamw"] = ShardedAdamW(
            others,
            lr=adam,
            betas=ADAM_BETAS,
            weight_decay=config.weight_decay,
            fused=current_device().type in ("cpu", "cuda"),
        )
        parts["adamw"].param_groups[0]["kind"] = "adamw"
    return CombinedOptimizer(parts)


def set_learning_rates(optimizer: torch.optim.Optimizer, *, muon: float, adam: float) -> None:
    """Sets the rate of every group by its kind."""
    for group in optimizer.param_groups:
        group["lr"] = muon if group["kind"] == "muon" else adam

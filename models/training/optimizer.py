"""Optimiser: Muon for matrices, AdamW for the rest.

It neither clips nor schedules. Callers set `lr` in the groups; a group's `kind` determines which of
the two rates applies.

Muon replaces the momentum of each matrix by the nearest orthogonal matrix (`orthogonalise`) and scales
it by 0.2 * sqrt(longer side), so that its updates are as large as AdamW's (arXiv 2502.16982). An expert is
one matrix, and so is each head's query, key and value. A matrix that is sharded over ranks is gathered
first, except for heads, which stay whole. Ranks that hold the same matrices divide the products. AdamW's
state is sharded over data-parallel ranks (`ShardedAdamW`), Muon's momentum is not.

Shapes: M matrices, R rows, C columns, R <= C.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    state_replica_group,
)
from ostinato.models.network.parallel.stages import pipeline_group
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer_config import OptimizerConfig


class ShardedAdamW(torch.optim.AdamW):
    """AdamW over the parameters that this rank owns (ZeRO stage 1, arXiv 1910.02054). All ranks step
    it together. Each parameter has one owner, the only rank that keeps its moments, updates it and
    sends it to the others. The result equals that of one rank, bit for bit.

    Megatron's distributed optimizer needs a CUDA device. torch's ZeroRedundancyOptimizer supports
    only one group of ranks, while dense parameters and experts have different groups here, and it
    writes a rank's state in its own format.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        fused: bool,
    ) -> None:
        self.all_parameters = list(parameters)
        self._owners = _assign_owners(self.all_parameters)
        owned = [
            parameter
            for parameter, owner in zip(self.all_parameters, self._owners, strict=True)
            if owner == _rank_among_holders(parameter)
        ]
        # as a group, since torch refuses an empty list and a rank may own no parameter
        super().__init__(
            [{"params": owned}], lr=lr, betas=betas, weight_decay=weight_decay, fused=fused
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter, on all ranks."""
        super().step()
        sent = [self._send(index, parameter) for index, parameter in enumerate(self.all_parameters)]
        for work in sent:
            if work is not None:
                work.wait()

    def _send(self, index: int, tensor: Tensor) -> dist.Work | None:
        """Begins to send a tensor from the owner of parameter `index` to the parameter's other holders."""
        group = state_replica_group(self.all_parameters[index])
        if group is None or group.size() == 1:
            return None
        source = dist.get_global_rank(group, self._owners[index])
        return dist.broadcast(tensor, src=source, group=group, async_op=True)


def _rank_among_holders(parameter: Tensor) -> int:
    group = state_replica_group(parameter)
    return 0 if group is None else group.rank()


def _assign_owners(parameters: list[Tensor]) -> list[int]:
    """The owner of each parameter, as its rank among the holders. Parameters are assigned largest
    first, each to the rank with the fewest elements.
    """
    owners = [0] * len(parameters)
    loads: dict[dist.ProcessGroup, list[int]] = {}
    for index in sorted(range(len(parameters)), key=lambda one: -parameters[one].numel()):
        group = state_replica_group(parameters[index])
        if group is not None:
            load = loads.setdefault(group, [0] * group.size())
            owners[index] = min(range(len(load)), key=load.__getitem__)
            load[owners[index]] += parameters[index].numel()
    return owners


# coefficients of Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon)
QUINTIC = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices_MRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near 1."""
    working = matrices_MRC.to(dtype)
    working = working / (working.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    linear, cubic, fifth = QUINTIC
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = working @ working.mT
        working = torch.baddbmm(
            working, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=fifth), working, beta=linear
        )
    return working.to(matrices_MRC.dtype)


def orthogonalise_all(
    stacks: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """`orthogonalise_shared` of stacks of any shapes, wide or tall. Stacks of equal shape are joined."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    wide = [one if one.shape[-2] <= one.shape[-1] else one.mT for one in stacks]
    for index, one in enumerate(wide):
        by_shape.setdefault((one.shape[-2], one.shape[-1]), []).append(index)
    joined = [torch.cat([wide[index] for index in same]) for same in by_shape.values()]
    results: dict[int, Tensor] = {}
    for same, whole in zip(
        by_shape.values(), orthogonalise_shared(joined, dtype, group), strict=True
    ):
        results |= zip(same, whole.split([len(wide[index]) for index in same]), strict=True)
    return [
        results[index] if one.shape == wide[index].shape else results[index].mT
        for index, one in enumerate(stacks)
    ]


def orthogonalise_shared(
    stacks: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """`orthogonalise` of stacks that every rank of a group holds. Each rank computes its share, and
    the results are gathered. `group` None: no other rank holds them.
    """
    if group is None or group.size() == 1:
        return [orthogonalise(stack, dtype) for stack in stacks]
    gathers = []
    for stack, counts in zip(
        stacks, assign_to_ranks([tuple(one.shape) for one in stacks], group.size()), strict=True
    ):
        shares = stack.split(counts)
        mine = shares[group.rank()]
        padded = mine.new_zeros((max(counts), *stack.shape[1:]), dtype=dtype)
        if len(mine):
            padded[: len(mine)] = orthogonalise(mine, dtype)
        parts = [torch.empty_like(padded) for _ in counts]
        gathers.append((parts, counts, dist.all_gather(parts, padded, group=group, async_op=True)))
    whole = []
    for stack, (parts, counts, gather) in zip(stacks, gathers, strict=True):
        gather.wait()
        pieces = [part[:count] for part, count in zip(parts, counts, strict=True)]
        whole.append(torch.cat(pieces).to(stack.dtype))
    return whole


def assign_to_ranks(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[list[int]]:
    """Number of matrices of each stack by rank: equal numbers, with the remainder on the ranks with
    the least work so far.
    """
    loads = [0] * ranks
    assigned: dict[int, list[int]] = {}
    costs = [rows**2 * columns for _, rows, columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda one: -costs[one]):
        each, left = divmod(shapes[index][0], ranks)
        idlest = sorted(range(ranks), key=lambda rank: loads[rank])[:left]
        counts = [each + (rank in idlest) for rank in range(ranks)]
        loads = [load + count * costs[index] for load, count in zip(loads, counts, strict=True)]
        assigned[index] = counts
    return [assigned[index] for index in range(len(shapes))]


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

"""Child entry of `ostinato plan --dry-run`: rank 0 of a layout, without values and without other ranks.

The model is built by the code that trains, on torch's meta device and in process groups that talk to
nobody; one microbatch runs forward and backward, gradients are summed, the optimiser steps. Nothing
is computed: shapes go through every operation, and collectives are counted instead of run. Where
shapes depend on values, all ranks are taken to have the same number of tokens, and all experts too.
The products inside experts are left out: thousands of small calls that exchange nothing.

Shapes: B rows, T tokens.
"""

import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, TrainingError, boundary
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.network.experts import ExpertMlp
from ostinato.models.process_groups import open_process_groups
from ostinato.models.spec import ModelSpec
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer import build_optimizer
from ostinato.tasks.planning.shapes import EMBEDDING, stage_of_tensor, stage_parameters
from ostinato.tasks.planning.walked import BuiltStage, DryRunRequest, DryRunResult, Exchange

META = torch.device("meta")
aten = torch.ops.aten

# Bytes that a rank of n sends, from the bytes of the larger side of a collective.
RING: dict[str, Callable[[int], float]] = {
    "allreduce_": lambda n: 2 * (n - 1) / n,
    "allreduce_coalesced_": lambda n: 2 * (n - 1) / n,
    "_allgather_base_": lambda n: (n - 1) / n,
    "allgather_": lambda n: (n - 1) / n,
    "_reduce_scatter_base_": lambda n: (n - 1) / n,
    "reduce_scatter_": lambda n: (n - 1) / n,
    "broadcast_": lambda n: 1.0,
    "alltoall_base_": lambda n: (n - 1) / n,
}
# These answer with their work, the others with their tensors too.
WORK_ALONE = ("alltoall_base_", "allreduce_coalesced_")


class ShapeWalk(TorchDispatchMode):
    """Operations on shapes. Collectives are counted by phase."""

    def __init__(self, spec: ModelSpec, rank_tokens: int) -> None:
        """`rank_tokens`: of a microbatch, on each rank of a tensor-parallel group."""
        super().__init__()
        self._chosen_share = spec.experts_per_token / spec.num_experts if spec.num_experts else 1.0
        self._rank_tokens = rank_tokens
        self._phase = ""
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.sent_bytes: dict[tuple[str, str, int], float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Collectives inside belong to the phase."""
        self._phase = name
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._count(func, args)
        first = args[0] if args else None
        if (
            func is aten._local_scalar_dense.default
        ):  # ranks tell each other how many tokens they have
            return self._rank_tokens
        if func is aten.bincount.default:
            return _even_counts(args[0].numel(), kwargs.get("minlength") or args[2])
        if func is aten.masked_select.default:
            return args[0].new_empty(round(args[0].numel() * self._chosen_share))
        if func is aten._to_copy.default and isinstance(first, Tensor) and first.is_meta:
            kwargs = {**kwargs, "device": META}
        return func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))

    def _count(self, func: Any, args: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name not in RING:
            raise ValueError(f"collective {name!r} was not expected, wanted one of {sorted(RING)}")
        group = next(one for one in args if isinstance(one, torch.ScriptObject))
        ranks = dist.ProcessGroup.unbox(group).size()
        sides = [sum(one.nbytes for one in _tensors(part)) for part in args[:2]]
        key = (self._phase, name.strip("_"), ranks)
        self.calls[key] += 1
        self.sent_bytes[key] += max(sides) * RING[name](ranks)
        work = FakeWork().boxed()
        return work if name in WORK_ALONE else (args[0], work)


def _tensors(part: Any) -> list[Tensor]:
    """Tensors of an argument, which may be lists of lists."""
    if isinstance(part, Tensor):
        return [part]
    return [one for piece in part for one in _tensors(piece)] if isinstance(part, list) else []


def _to_meta(value: Any) -> Any:
    is_elsewhere = isinstance(value, Tensor) and not value.is_meta and value.ndim
    return torch.empty_like(value, device=META) if is_elsewhere else value


def _even_counts(total: int, bins: int) -> Tensor:
    """So many tokens over so many experts, as evenly as goes."""
    counts = torch.full((bins,), total // bins, dtype=torch.int64, device="cpu")
    counts[: total % bins] += 1
    return counts


def main(request: DryRunRequest, workspace: Workspace) -> DryRunResult:
    """Builds, compares, walks. ConfigError names what the layout needs and training has not at all."""
    started_at = time.monotonic()
    layout, not_walked = trained_layout(request.layout)
    with boundary(TrainingError, "dry run"):
        open_process_groups(world_size=layout.world_size, layout=layout, kind="meta")
        workspace.progress.update(0, 2, "building")
        model = build_trainer_model(request.spec, world_size=layout.world_size)
        gradients = LayoutGradients(model)
        optimizer = build_optimizer(model, request.optimizer)
        workspace.progress.update(1, 2, "walking")
        walk, microbatches = _walk(request, layout, model, gradients, optimizer)
    states = [value for one in optimizer.parts.values() for value in one.state.values()]
    return DryRunResult(
        stages=built_stages(model, request.spec, request.layout),
        microbatches=microbatches,
        exchanges=_exchanges(walk, microbatches),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        gradient_bytes=sum(4 * one.numel() for one in gradients.parameters),
        optimizer_bytes=sum(value.nbytes for one in states for value in _tensors([*one.values()])),
        not_walked=not_walked,
        wall_seconds=time.monotonic() - started_at,
    )


def trained_layout(layout: ParallelLayout) -> tuple[ParallelLayout, tuple[str, ...]]:
    """The layout that this version's training makes of a planned one, and what it leaves out."""
    if layout.expert_tensor > 1:
        raise ConfigError(
            f"expert_tensor={layout.expert_tensor}, wanted 1: training keeps experts whole, so that a rank's "
            "part cannot be built"
        )
    missing = []
    if layout.pipeline > 1:
        missing.append(
            f"pipeline={layout.pipeline}: training has no pipeline parallelism yet. Layers are counted to "
            "their stages; the walk takes one rank through all of them, and nothing passes between stages"
        )
    if layout.context > 1:
        missing.append(
            f"context={layout.context}: training has no context parallelism yet. The walk keeps rows whole and "
            "counts these ranks as data parallelism"
        )
    ranks = layout.world_size // layout.pipeline
    return ParallelLayout.over(ranks, tensor=layout.tensor, expert=layout.expert), tuple(missing)


def built_stages(
    model: TrainerModel, spec: ModelSpec, layout: ParallelLayout
) -> tuple[BuiltStage, ...]:
    """Elements that the model's tensors have on this rank, by stage, beside the plan's count."""
    built = [0] * layout.pipeline
    for name, tensor in model.canonical_tensors().items():
        built[stage_of_tensor(spec, layout, name)] += tensor.numel()
        if name == EMBEDDING and spec.tied_embeddings and layout.pipeline > 1:
            built[-1] += tensor.numel()
    return tuple(
        BuiltStage(stage=stage, planned=planned.all, built=built[stage])
        for stage, planned in enumerate(stage_parameters(spec, layout))
    )


def _pass_experts(
    experts: ExpertMlp, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor
) -> Tensor:
    """Of the shape of the experts' output, and with a gradient for all that they read."""
    return tokens_ND + weights_NK.sum() + experts.gate_up_EGD.sum() + experts.down_EDF.sum()


def _walk(
    request: DryRunRequest,
    layout: ParallelLayout,
    model: TrainerModel,
    gradients: LayoutGradients,
    optimizer: torch.optim.Optimizer,
) -> tuple[ShapeWalk, int]:
    """One microbatch and one update. Also returns the microbatches of a rank in a step."""
    work = request.work
    rows = max(1, work.microbatch_tokens // work.row_tokens)
    walk = ShapeWalk(request.spec, rows * work.row_tokens // layout.tensor)
    tokens_BT = torch.empty(rows, work.row_tokens, dtype=torch.int64, device=META)
    for layer in model.layers[request.spec.num_dense_layers :]:
        layer.mlp.experts.forward = functools.partial(_pass_experts, layer.mlp.experts)
    gradients.clear()
    with walk.phase("forward"):
        loss = -model.token_logprobs(tokens_BT).sum()
    with walk.phase("backward"):
        loss.backward()
    with walk.phase("gradients"):
        gradients.reduce()
    with walk.phase("optimiser"):
        optimizer.step()
    return walk, math.ceil(work.microbatches(request.layout))


def _exchanges(walk: ShapeWalk, microbatches: int) -> tuple[Exchange, ...]:
    found = []
    for (phase, operation, ranks), calls in walk.calls.items():
        times = microbatches if phase in ("forward", "backward") else 1
        found.append(
            Exchange(
                phase=phase,
                operation=operation,
                group_ranks=ranks,
                calls=times * calls,
                sent_bytes=times * walk.sent_bytes[phase, operation, ranks],
            )
        )
    return tuple(one for one in found if one.group_ranks > 1)

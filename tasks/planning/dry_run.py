"""Child entry of `ostinato plan --dry-run`: one rank of each pipeline stage, without values and
without other ranks.

The training code builds the rank's part on torch's meta device, in process groups without
communication. Megatron's schedule runs one microbatch (with interleaving, one per stage) forward
and backward, gradients are summed, and the optimiser steps. A step of RL first passes it forward
for the log-probs of its KL reference. Nothing is computed: shapes pass
through every operation, and collectives are counted instead of run. Where shapes depend on values,
all ranks and all experts are assumed to have the same number of tokens. The products inside experts
are skipped, since they are thousands of small calls without communication.

Shapes: B rows, T tokens.
"""

import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import TrainingError, boundary
from ostinato.models.network.build import TrainerModel, build_trainer_model, recompute_layers
from ostinato.models.network.experts import ExpertMlp
from ostinato.models.process_groups import close_process_groups, open_process_groups
from ostinato.models.spec import ModelSpec
from ostinato.models.training.batch import TokenBatch
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.schedule import run_microbatches
from ostinato.tasks.planning.dry_run_records import (
    DryRunRequest,
    DryRunResult,
    DryRunStage,
    Exchange,
)
from ostinato.tasks.planning.shapes import StageParameters, stage_parameters

META = torch.device("meta")
LOGPROBS = "log-probs"  # phase of the passes without backward
aten = torch.ops.aten

# Bytes that one of n ranks sends, relative to the bytes of a collective's larger side.
RING: dict[str, Callable[[int], float]] = {
    "allreduce_": lambda n: 2 * (n - 1) / n,
    "allreduce_coalesced_": lambda n: 2 * (n - 1) / n,
    "_allgather_base_": lambda n: (n - 1) / n,
    "allgather_": lambda n: (n - 1) / n,
    "_reduce_scatter_base_": lambda n: (n - 1) / n,
    "reduce_scatter_": lambda n: (n - 1) / n,
    "broadcast_": lambda n: 1.0,
    "alltoall_base_": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "recv_": lambda n: 0.0,
}
# These return only their work handle; the others also return their tensors.
WORK_ALONE = ("alltoall_base_", "allreduce_coalesced_", "send")


class ShapeWalk(TorchDispatchMode):
    """Dispatch mode that computes only shapes and counts collectives by phase."""

    def __init__(self, spec: ModelSpec, rank_tokens: int) -> None:
        """`rank_tokens`: tokens of a microbatch on each rank of a tensor-parallel group."""
        super().__init__()
        self._chosen_share = spec.experts_per_token / spec.num_experts if spec.num_experts else 1.0
        self._rank_tokens = rank_tokens
        self._phase = ""
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.sent_bytes: dict[tuple[str, str, int], float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts collectives inside under this phase, unless another phase is nested."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._count(func, args)
        first: Any = args[0] if args else None
        # the only numbers that are read are ranks' numbers of tokens
        if func is aten._local_scalar_dense.default:
            return self._rank_tokens
        if func is aten.bincount.default:
            return _even_counts(args[0].numel(), kwargs.get("minlength") or args[2])
        if func is aten.nonzero.default:  # applied to a mask: every token is a target
            return first.new_empty(first.numel(), first.ndim, dtype=torch.int64)
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            return first.new_empty(first.shape)
        if func is aten.masked_select.default:
            return args[0].new_empty(round(args[0].numel() * self._chosen_share))
        if func is aten._to_copy.default and isinstance(first, Tensor) and first.is_meta:
            kwargs = {**kwargs, "device": META}
        return func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))

    def _count(self, func: Any, args: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name not in RING:
            raise ValueError(f"collective {name!r} was not expected, wanted one of {sorted(RING)}")
        if name == "recv_":
            return FakeWork().boxed()
        group = next(one for one in args if isinstance(one, torch.ScriptObject))
        ranks = dist.ProcessGroup.unbox(group).size()
        sides = [sum(one.nbytes for one in _tensors(part)) for part in args[:2]]
        key = self._phase, name.strip("_"), ranks
        if name == "send":  # to one neighbour, whatever the group's size
            key = LOGPROBS if self._phase == LOGPROBS else "pipeline", name, 2
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
    """`total` tokens over `bins` experts, as evenly as possible."""
    counts = torch.full((bins,), total // bins, dtype=torch.int64, device="cpu")
    counts[: total % bins] += 1
    return counts


@contextmanager
def _even_exchange() -> Iterator[None]:
    """Makes all-to-alls send equally many tokens to every rank, already in the order of the experts."""

    def count(
        dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        chosen = dispatcher.routing_map.shape[0] * dispatcher.config.moe_router_topk
        ranks = dispatcher.ep_size
        sent = np.full(ranks, chosen // ranks)
        sent[: chosen % ranks] += 1
        dispatcher.input_splits = dispatcher.output_splits = sent
        dispatcher.output_splits_tp = np.full(dispatcher.tp_size, chosen)
        return tokens_per_expert

    def keep_order(tokens: Tensor, *_: Any, probs: Tensor | None = None, **__: Any) -> Any:
        return tokens, probs

    stand_ins = (
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", count),
        (token_dispatcher, "sort_chunks_by_idxs", keep_order),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    for owner, name, one in stand_ins:
        setattr(owner, name, one)
    try:
        yield
    finally:
        for owner, name, one in before:
            setattr(owner, name, one)


def main(request: DryRunRequest, workspace: Workspace) -> DryRunResult:
    """Walks one rank of each pipeline stage."""
    started_at = time.monotonic()
    layout = request.layout
    stages = []
    with boundary(TrainingError, "dry run"):
        for planned in enumerate(stage_parameters(request.spec, layout)):
            stages.append(_walk_stage(request, *planned))
            workspace.progress.update(len(stages), layout.pipeline, "walking")
    return DryRunResult(
        stages=tuple(stages),
        microbatches=math.ceil(request.work.microbatches(layout)),
        wall_seconds=time.monotonic() - started_at,
    )


def _walk_stage(request: DryRunRequest, stage: int, planned: StageParameters) -> DryRunStage:
    """Tensors that one rank of a stage holds, and bytes that it sends in a step."""
    layout = request.layout
    close_process_groups()
    first_rank = stage * layout.world_size // layout.pipeline
    open_process_groups(first_rank, layout.world_size, layout=layout, kind="meta")
    model = build_trainer_model(request.spec, world_size=layout.world_size)
    model.draft.requires_grad_(False)  # as in pretraining
    recompute_layers(model, request.work.recompute)
    gradients = LayoutGradients(model)
    optimizer = build_optimizer(model, request.optimizer)
    with _even_exchange():
        exchanges = _walk(request, model, gradients, optimizer)
    states = [value for one in optimizer.parts.values() for value in one.state.values()]
    return DryRunStage(
        stage=stage,
        planned=planned.all,
        built=sum(tensor.numel() for tensor in model.canonical_tensors().values()),
        exchanges=exchanges,
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        gradient_bytes=sum(4 * one.numel() for one in gradients.parameters),
        optimizer_bytes=sum(value.nbytes for one in states for value in _tensors([*one.values()])),
    )


def _pass_experts(
    experts: ExpertMlp, tokens_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor
) -> Tensor:
    """Stand-in for the experts: an output of their shape, with gradients for all their inputs."""
    return tokens_ND + weights_NK.sum() + experts.gate_up_EGD.sum() + experts.down_EDF.sum()


def _walk(
    request: DryRunRequest,
    model: TrainerModel,
    gradients: LayoutGradients,
    optimizer: torch.optim.Optimizer,
) -> tuple[Exchange, ...]:
    """Runs a few microbatches and one update on shapes. Returns the collectives of a whole step."""
    work, layout = request.work, request.layout
    rows = max(1, work.microbatch_tokens // work.row_tokens)
    parts = layout.tensor * layout.context
    walk = ShapeWalk(request.spec, rows * work.row_tokens // parts)
    tokens_BT = torch.empty(rows, work.row_tokens, dtype=torch.int64, device=META)
    mask_BT = torch.empty(tokens_BT.shape, dtype=torch.bool, device=META)
    batch = TokenBatch(tokens_BT, mask_BT, mask_BT)
    for layer in model.layers:
        if layer.layer_number > request.spec.num_dense_layers:
            layer.mlp.experts.forward = functools.partial(_pass_experts, layer.mlp.experts)
    run_chunk: Any = model.run_chunk

    def forward(*arguments: Any, **options: Any) -> Tensor:
        with walk.phase("forward" if torch.is_grad_enabled() else LOGPROBS):
            return run_chunk(*arguments, **options)

    def loss(batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        with walk.phase("forward" if torch.is_grad_enabled() else LOGPROBS):
            logprobs_C = model.target_logprobs(hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
            return -logprobs_C.sum(), len(logprobs_C)

    model.run_chunk = forward  # type: ignore[method-assign]
    num_batches = layout.pipeline if layout.interleave > 1 else 1
    with walk, walk.phase(LOGPROBS), torch.no_grad():
        # by a reference of the model's shapes; without backward, stages run whole rounds
        for _ in range(work.forward_passes):
            run_microbatches(model, [batch] * layout.pipeline, loss, has_backward=False)
    gradients.clear()
    with walk, walk.phase("backward"):
        run_microbatches(model, [batch] * num_batches, loss)
    with walk, walk.phase("gradients"):
        gradients.reduce()
    with walk, walk.phase("optimiser"):
        optimizer.step()
    microbatches = math.ceil(work.microbatches(layout))
    times = {"gradients": 1.0, "optimiser": 1.0, LOGPROBS: microbatches / layout.pipeline}
    return _exchanges(walk, times, microbatches / num_batches)


def _exchanges(walk: ShapeWalk, times: Mapping[str, float], usual: float) -> tuple[Exchange, ...]:
    """Collectives over several ranks, those of each phase as often as `times` says, else `usual`."""
    found = []
    for (phase, operation, ranks), calls in walk.calls.items():
        repeats = times.get(phase, usual)
        found.append(
            Exchange(
                phase=phase,
                operation=operation,
                group_ranks=ranks,
                calls=round(repeats * calls),
                sent_bytes=repeats * walk.sent_bytes[phase, operation, ranks],
            )
        )
    return tuple(one for one in found if one.group_ranks > 1)

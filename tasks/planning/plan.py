"""A plan of training on many GPUs: the layout, and what it comes to. Refused when it does not fit."""

import itertools
from collections.abc import Iterator

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.inputs import Inputs
from ostinato.tasks.planning.memory import RankMemory, stage_memory
from ostinato.tasks.planning.rollouts import RolloutPlan, estimate_replica, plan_rollouts
from ostinato.tasks.planning.step import GIGA, StepTime, estimate_step
from ostinato.tasks.planning.workload import RolloutWork, TrainingWork

DEGREES = (1, 2, 4, 8, 16, 32, 64, 128)


class TrainingPlan(Record):
    """One kind of step under a layout."""

    layout: ParallelLayout
    work: TrainingWork
    memory: tuple[RankMemory, ...] = Field(description="memory by pipeline stage")
    step: StepTime

    @property
    def fullest(self) -> RankMemory:
        """The stage whose ranks hold most."""
        return max(self.memory, key=lambda one: one.total_gib)


class PublishBytes(Record):
    """Bytes of the weight chain."""

    anchor: float = Field(description="all weights")
    delta: float = Field(description="the weights that a step changes")

    def delta_seconds(self, inputs: Inputs) -> float:
        """Seconds of a delta through the network port of one GPU."""
        network = inputs.chip.network_gigabytes_per_second * GIGA * inputs.rates.network
        return self.delta / network


def plan_training(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> TrainingPlan:
    """A step under a given layout. ConfigError names the number that breaks."""
    try:
        layout.check(spec)
    except ValueError as error:
        raise ConfigError(f"layout does not fit the model: {error}") from None
    if refusal := _refusal(layout, work, inputs):
        raise ConfigError(refusal)
    plan = _estimate(spec, layout, work, inputs)
    held, has = plan.fullest, inputs.chip.memory_gib
    if held.total_gib > has:
        kinds = held.model_dump(exclude={"stage"})
        largest = max(kinds, key=lambda kind: kinds[kind])
        raise ConfigError(
            f"a rank of pipeline stage {held.stage} needs {held.total_gib:.1f} GiB, wanted at most "
            f"{has:.1f}: {largest} = {kinds[largest]:.1f}"
        )
    return plan


def search_layout(spec: ModelSpec, gpus: int, work: TrainingWork, inputs: Inputs) -> TrainingPlan:
    """The fastest layout of so many GPUs that fits. ConfigError tells how far the nearest is from it."""
    found: TrainingPlan | None = None
    least: TrainingPlan | None = None
    for layout in _layouts(spec, gpus, inputs):
        for recompute in (False, True):
            one = work.model_copy(update={"recompute": recompute})
            if _refusal(layout, one, inputs):
                continue
            plan = _estimate(spec, layout, one, inputs)
            if least is None or plan.fullest.total_gib < least.fullest.total_gib:
                least = plan
            if plan.fullest.total_gib > inputs.chip.memory_gib:
                continue
            if found is None or plan.step.seconds < found.step.seconds:
                found = plan
    if found is not None:
        return found
    if least is None:
        raise ConfigError(
            f"no layout of {gpus} GPUs divides the model and a step of {work.step_tokens:.0f} tokens "
            f"in microbatches of {work.microbatch_tokens}; wanted a number of GPUs with small factors"
        )
    raise ConfigError(
        f"no layout of {gpus} GPUs fits: the smallest, {describe(least.layout)}, needs "
        f"{least.fullest.total_gib:.1f} GiB a rank, wanted at most {inputs.chip.memory_gib:.1f}; "
        "take more GPUs or smaller microbatches"
    )


def search_replica(
    spec: ModelSpec, work: RolloutWork, step_seconds: float, inputs: Inputs
) -> RolloutPlan:
    """Rollouts on replicas of the size that takes fewest GPUs altogether."""
    plans: list[RolloutPlan] = []
    refusal = ConfigError("no size of a replica was tried")
    for gpus in DEGREES:
        if spec.num_query_groups % min(gpus, inputs.chip.gpus_per_node):
            continue
        try:
            estimate_replica(spec, gpus, work, inputs)
        except ConfigError as error:
            refusal = error
            continue
        plans.append(plan_rollouts(spec, gpus, work, step_seconds, inputs))
    if not plans:
        raise refusal
    return min(plans, key=lambda plan: plan.replicas * plan.replica.gpus)


def publish_bytes(spec: ModelSpec, inputs: Inputs) -> PublishBytes:
    """Bytes that one publish moves to each cluster of engines."""
    parameters, costs = num_parameters(spec), inputs.costs
    return PublishBytes(
        anchor=costs.weight_bytes * parameters,
        delta=costs.changed_share * parameters * costs.delta_bytes,
    )


def describe(layout: ParallelLayout) -> str:
    """Degrees in one line."""
    return (
        f"TP {layout.tensor}, CP {layout.context}, PP {layout.pipeline} x {layout.interleave}, "
        f"DP {layout.data}, EP {layout.expert}, ETP {layout.expert_tensor}, EDP {layout.expert_data}"
    )


def _estimate(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> TrainingPlan:
    return TrainingPlan(
        layout=layout,
        work=work,
        memory=stage_memory(spec, layout, work, inputs.costs),
        step=estimate_step(spec, layout, work, inputs),
    )


def _refusal(layout: ParallelLayout, work: TrainingWork, inputs: Inputs) -> str | None:
    """Why a layout cannot take the work. None if it can."""
    if layout.tensor > inputs.chip.gpus_per_node:
        return (
            f"tensor={layout.tensor}, wanted at most the {inputs.chip.gpus_per_node} GPUs of a node"
        )
    if work.row_tokens % (2 * layout.context * layout.tensor):
        return (
            f"rows of {work.row_tokens} tokens, wanted a multiple of 2 x context x tensor = "
            f"{2 * layout.context * layout.tensor}: zig-zag halves each part"
        )
    share = work.step_tokens / layout.data
    if share < work.microbatch_tokens:
        return (
            f"data={layout.data} leaves {share:.0f} tokens of a step to each rank, wanted at least "
            f"one microbatch of {work.microbatch_tokens}"
        )
    return None


def _layouts(spec: ModelSpec, gpus: int, inputs: Inputs) -> Iterator[ParallelLayout]:
    """Layouts of so many GPUs that divide the model."""
    tensors = [degree for degree in DEGREES if degree <= inputs.chip.gpus_per_node]
    experts = DEGREES if spec.num_experts else (1,)
    for tensor, context, pipeline, expert in itertools.product(
        tensors, DEGREES[:4], DEGREES[:6], experts
    ):
        if tensor * context * pipeline > gpus:
            continue
        try:
            layout = ParallelLayout.over(
                gpus, tensor=tensor, context=context, pipeline=pipeline, expert=expert
            )
            layout.check(spec)
        except ValueError:
            continue
        yield layout

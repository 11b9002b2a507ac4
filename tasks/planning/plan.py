"""A plan of training on many GPUs: layout, memory and time. A plan that does not fit is refused."""

import itertools
from collections.abc import Iterator

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import AxisValues, Inputs, TrainingWork
from ostinato.tasks.planning.shapes import (
    RankMemory,
    stage_activation_bytes,
    stage_memory,
    stage_parameters,
    token_operations,
)

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


class StepTime(Record):
    """Seconds of one step, part by part."""

    compute_seconds: float
    memory_seconds: float
    launch_seconds: float
    transfer_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    forward_seconds: float
    reinforcement_seconds: float = Field(description="seconds more in RL than outside")
    sent: AxisValues = Field(description="bytes that one rank sends")
    mfu: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step. Computation takes at least the time of its kernel launches."""
        busy = max(self.compute_seconds + self.memory_seconds, self.launch_seconds)
        rest = self.bubble_seconds + self.optimizer_seconds + self.forward_seconds
        return busy + self.transfer_seconds + rest + self.reinforcement_seconds


def estimate_step(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> StepTime:
    """Time of a step under a layout, with equal ranks."""
    world, local = layout.world_size, work.step_tokens / layout.world_size
    operations = token_operations(spec, work.attended_tokens)
    passes = 4 if work.recompute else 3
    forward = local * _operation_seconds(spec, work, inputs)
    compute = passes * forward
    memory = local * _memory_seconds(spec, inputs)
    launches = work.microbatches(layout) * _launch_seconds(spec, layout, inputs)
    sent = _sent(spec, layout, work)
    transfer = _transfer_seconds(layout, sent, inputs)
    busy = max(compute + memory, launches)
    idle = (layout.pipeline - 1) / (layout.interleave * work.microbatches(layout))
    model = 3 * operations.all * work.step_tokens
    result = StepTime(
        compute_seconds=compute,
        memory_seconds=memory,
        launch_seconds=launches,
        transfer_seconds=transfer,
        bubble_seconds=idle * (busy + transfer),
        optimizer_seconds=_optimizer_seconds(spec, layout, inputs),
        forward_seconds=work.forward_passes * (busy + transfer) * (1 + idle) / passes,
        reinforcement_seconds=0.0,
        sent=sent,
        mfu=0.0,
    )
    more = result.seconds * (inputs.costs.rl_training_factor - 1) * work.is_reinforcement
    peak = inputs.chip.bf16_teraflops * TERA * world
    mfu = model / ((result.seconds + more) * peak)
    return result.model_copy(update={"reinforcement_seconds": more, "mfu": mfu})


def _operation_seconds(spec: ModelSpec, work: TrainingWork, inputs: Inputs) -> float:
    """Seconds of one token's forward pass on one chip. Narrow products do not reach their rates."""
    chip, rates = inputs.chip, inputs.rates
    operations = token_operations(spec, work.attended_tokens)
    peak = (chip.fp8_teraflops if work.fp8 else chip.bf16_teraflops) * TERA
    products = rates.fp8_products if work.fp8 else rates.bf16_products
    grouped = rates.fp8_grouped if work.fp8 else rates.bf16_grouped
    products /= 1 + rates.hidden_half / spec.hidden_size
    grouped /= 1 + rates.expert_half / max(1, spec.expert_hidden_size)
    attention = operations.attention / (chip.bf16_teraflops * TERA * rates.attention)
    return operations.products / peak / products + operations.grouped / peak / grouped + attention


def _memory_seconds(spec: ModelSpec, inputs: Inputs) -> float:
    """Seconds of one token's operations except products: the time to move the activations that layers save."""
    bandwidth = inputs.chip.memory_terabytes_per_second * TERA * inputs.rates.copying
    saved = stage_activation_bytes(spec, ParallelLayout(), 0)
    head = 8 * spec.vocab_size
    return inputs.costs.activation_passes * (saved + head) / bandwidth


def _launch_seconds(spec: ModelSpec, layout: ParallelLayout, inputs: Inputs) -> float:
    """Seconds that the host of one rank needs to launch one microbatch's kernels."""
    costs = inputs.costs
    kernels = spec.num_dense_layers * costs.dense_layer_kernels
    kernels += spec.num_moe_layers * costs.moe_layer_kernels
    return kernels / layout.pipeline * costs.kernel_microseconds * MICRO


def _sent(spec: ModelSpec, layout: ParallelLayout, work: TrainingWork) -> AxisValues:
    hidden = 2 * spec.hidden_size
    # tokens that a data-parallel rank's context slice sees, and layers of a stage
    tokens = work.step_tokens / layout.data / layout.context
    layers = spec.num_layers / layout.pipeline
    moe = spec.num_moe_layers / layout.pipeline
    held = max(stage_parameters(spec, layout), key=lambda one: one.all)
    copies = layout.data * layout.context
    data = _outside(copies) * held.dense + _outside(layout.expert_data) * held.expert
    # every tensor-parallel rank needs whole latents
    exchanged = spec.cached_size / (layout.tensor if spec.latent is None else 1)
    routed = tokens / layout.tensor * spec.experts_per_token * hidden
    return AxisValues(
        # gather and scatter around attention and MLP, forward and backward
        tensor=8 * layers * tokens * hidden * _outside(layout.tensor),
        # dispatch and combine, forward and backward
        expert=4 * moe * routed * _outside(layout.expert * layout.expert_tensor),
        # keys and values, and their gradients
        context=layers * tokens * 4 * exchanged * (layout.context - 1),
        pipeline=2
        * tokens
        * hidden
        / layout.tensor
        * (layout.interleave if layout.pipeline > 1 else 0),
        # gradients scattered in fp32, weights gathered in bf16
        data=6 * data,
    )


def _outside(degree: int) -> float:
    """Share of a group's data that is on other ranks."""
    return (degree - 1) / degree


def _transfer_seconds(layout: ParallelLayout, sent: AxisValues, inputs: Inputs) -> float:
    shares = inputs.shares
    experts = layout.expert * layout.expert_tensor
    inner = layout.tensor * layout.context
    parts = {
        "tensor": (sent.tensor, shares.tensor, layout.tensor),
        "expert": (sent.expert, shares.expert, experts),
        "context": (sent.context, shares.context, inner),
        "pipeline": (sent.pipeline, shares.pipeline, layout.world_size),
        "data": (sent.data, shares.data, layout.world_size // layout.pipeline),
    }
    return sum(size * share / _bandwidth(span, inputs) for size, share, span in parts.values())


def _bandwidth(span: int, inputs: Inputs) -> float:
    """Bytes per second for a group that spans `span` neighbouring ranks. In a group over several
    domains of NVLink the share outside a domain uses the network.
    """
    chip, rates = inputs.chip, inputs.rates
    node = chip.node_gigabytes_per_second * GIGA * rates.node
    if span <= chip.linked_gpus:
        return node
    outside = 1 - chip.linked_gpus / span
    return 1 / ((1 - outside) / node + outside / inputs.network_bytes_per_second)


def _optimizer_seconds(spec: ModelSpec, layout: ParallelLayout, inputs: Inputs) -> float:
    bandwidth = inputs.chip.memory_terabytes_per_second * TERA * inputs.rates.copying
    sharded = max(
        held.dense / (layout.data * layout.context) + held.expert / layout.expert_data
        for held in stage_parameters(spec, layout)
    )
    return sharded * inputs.costs.optimizer_traffic_bytes / bandwidth


DEGREES = (1, 2, 4, 8, 16, 32, 64, 128)


class TrainingPlan(Record):
    """One kind of step under a layout."""

    layout: ParallelLayout
    work: TrainingWork
    memory: tuple[RankMemory, ...] = Field(description="memory by pipeline stage")
    step: StepTime

    @property
    def fullest(self) -> RankMemory:
        """Memory of the stage with the fullest ranks."""
        return max(self.memory, key=lambda one: one.total_gib)

    @property
    def lasting_gib(self) -> float:
        """The largest memory of a rank that stays in use between steps."""
        return max(one.lasting_gib for one in self.memory)

    def fits(self, inputs: Inputs) -> bool:
        """Whether the fullest rank has the memory that it needs."""
        return self.fullest.total_gib <= inputs.chip.memory_gib


def plan_training(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> TrainingPlan:
    """A step under a given layout. Raises ConfigError if it does not fit."""
    plan = estimate_training(spec, layout, work, inputs)
    if plan.fits(inputs):
        return plan
    held, kinds = plan.fullest, plan.fullest.model_dump(exclude={"stage"})
    largest = max(kinds, key=lambda kind: kinds[kind])
    raise ConfigError(
        f"a rank of pipeline stage {held.stage} needs {held.total_gib:.1f} GiB, wanted at most "
        f"{inputs.chip.memory_gib:.1f}: {largest} = {kinds[largest]:.1f}"
    )


def estimate_training(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> TrainingPlan:
    """A step under a given layout, also if it needs too much memory. Raises ConfigError if the layout
    cannot divide the model or the work.
    """
    try:
        layout.check(spec)
    except ValueError as error:
        raise ConfigError(f"layout does not fit the model: {error}") from None
    if refusal := _refusal(layout, work, inputs):
        raise ConfigError(refusal)
    return _estimate(spec, layout, work, inputs)


def search_layout(spec: ModelSpec, gpus: int, work: TrainingWork, inputs: Inputs) -> TrainingPlan:
    """The fastest layout of `gpus` GPUs that fits. If none does, ConfigError describes the smallest."""
    plans = estimate_layouts(spec, gpus, work, inputs)
    if fitting := [plan for plan in plans if plan.fits(inputs)]:
        return min(fitting, key=lambda plan: plan.step.seconds)
    least = min(plans, key=lambda plan: plan.fullest.total_gib)
    raise ConfigError(
        f"no layout of {gpus} GPUs fits: the smallest, {describe(least.layout)}, needs "
        f"{least.fullest.total_gib:.1f} GiB per rank, wanted at most {inputs.chip.memory_gib:.1f}; "
        "take more GPUs or smaller microbatches"
    )


def estimate_layouts(
    spec: ModelSpec, gpus: int, work: TrainingWork, inputs: Inputs
) -> list[TrainingPlan]:
    """A step under every layout of `gpus` GPUs, also under those that need too much memory. Raises
    ConfigError if no layout divides the model and the work.
    """
    choices = [work.model_copy(update={"recompute": recompute}) for recompute in (False, True)]
    plans = [
        _estimate(spec, layout, one, inputs)
        for layout in _layouts(spec, gpus, inputs)
        for one in choices
        if not _refusal(layout, one, inputs)
    ]
    if plans:
        return plans
    raise ConfigError(
        f"no layout of {gpus} GPUs divides the model and a step of {work.step_tokens:.0f} tokens "
        f"in microbatches of {work.microbatch_tokens}; wanted a number of GPUs with small factors"
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
    """Reason why a layout cannot run the work. None if it can."""
    if layout.tensor > (linked := inputs.chip.linked_gpus):
        return f"tensor={layout.tensor}, wanted at most the {linked} GPUs that NVLink joins"
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
    """Layouts of `gpus` GPUs that divide the model."""
    tensors = [degree for degree in DEGREES[:4] if degree <= inputs.chip.linked_gpus]
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

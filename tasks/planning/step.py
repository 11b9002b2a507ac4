"""Seconds and bytes of one optimiser step."""

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Inputs
from ostinato.tasks.planning.shapes import (
    stage_activation_bytes,
    stage_parameters,
    token_operations,
)
from ostinato.tasks.planning.workload import TrainingWork

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


class StepBytes(Record):
    """Bytes that one rank sends in one step."""

    tensor: float
    expert: float
    context: float
    pipeline: float
    data: float


class StepTime(Record):
    """Seconds of one step, part by part."""

    compute_seconds: float
    memory_seconds: float
    launch_seconds: float
    transfer_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    forward_seconds: float
    sent: StepBytes
    mfu: float

    @property
    def seconds(self) -> float:
        """The whole step. A host that launches too slowly bounds computing from below."""
        busy = max(self.compute_seconds + self.memory_seconds, self.launch_seconds)
        rest = self.bubble_seconds + self.optimizer_seconds + self.forward_seconds
        return busy + self.transfer_seconds + rest


def estimate_step(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> StepTime:
    """Time of a step under a layout, all ranks alike."""
    world, local = layout.world_size, work.step_tokens / layout.world_size
    operations = token_operations(spec, work.attended_tokens)
    passes = 4 if work.recompute else 3
    forward = local * _operation_seconds(spec, work, inputs)
    compute = passes * forward
    memory = _memory_seconds(spec, layout, work, inputs)
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
        sent=sent,
        mfu=0.0,
    )
    peak = inputs.chip.bf16_teraflops * TERA
    return result.model_copy(update={"mfu": model / (result.seconds * world * peak)})


def _operation_seconds(spec: ModelSpec, work: TrainingWork, inputs: Inputs) -> float:
    """Seconds of one token's forward pass on one chip."""
    chip, rates = inputs.chip, inputs.rates
    operations = token_operations(spec, work.attended_tokens)
    peak = (chip.fp8_teraflops if work.fp8 else chip.bf16_teraflops) * TERA
    products = rates.fp8_products if work.fp8 else rates.bf16_products
    grouped = rates.fp8_grouped if work.fp8 else rates.bf16_grouped
    attention = operations.attention / (chip.bf16_teraflops * TERA * rates.attention)
    return operations.products / peak / products + operations.grouped / peak / grouped + attention


def _memory_seconds(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, inputs: Inputs
) -> float:
    """Seconds of everything that is not a product: it moves what the layers save."""
    bandwidth = inputs.chip.memory_terabytes_per_second * TERA * inputs.rates.copying
    saved = sum(stage_activation_bytes(spec, layout, stage) for stage in range(layout.pipeline))
    head = 8 * spec.vocab_size
    local = work.step_tokens / layout.world_size
    return local * inputs.costs.activation_passes * (saved + head) / bandwidth


def _launch_seconds(spec: ModelSpec, layout: ParallelLayout, inputs: Inputs) -> float:
    """Seconds that the host of one rank needs to launch one microbatch's kernels."""
    costs = inputs.costs
    kernels = spec.num_dense_layers * costs.dense_layer_kernels
    kernels += spec.num_moe_layers * costs.moe_layer_kernels
    return kernels / layout.pipeline * costs.kernel_microseconds * MICRO


def _sent(spec: ModelSpec, layout: ParallelLayout, work: TrainingWork) -> StepBytes:
    hidden = 2 * spec.hidden_size
    # tokens that a data-parallel rank's context slice sees, and layers of a stage
    tokens = work.step_tokens / layout.data / layout.context
    layers = spec.num_layers / layout.pipeline
    moe = spec.num_moe_layers / layout.pipeline
    held = max(stage_parameters(spec, layout), key=lambda one: one.all)
    copies = layout.data * layout.context
    data = _outside(copies) * held.dense + _outside(layout.expert_data) * held.expert
    # of latents every tensor-parallel rank needs the whole
    exchanged = spec.cached_size / (layout.tensor if spec.latent is None else 1)
    routed = tokens / layout.tensor * spec.experts_per_token * hidden
    return StepBytes(
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
    """Share of a group's data that lies on its other ranks."""
    return (degree - 1) / degree


def _transfer_seconds(layout: ParallelLayout, sent: StepBytes, inputs: Inputs) -> float:
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
    """Bytes per second for a group that spans so many neighbouring ranks. Of a group over several
    nodes the part outside a node takes the network.
    """
    chip, rates = inputs.chip, inputs.rates
    node = chip.node_gigabytes_per_second * GIGA * rates.node
    if span <= chip.gpus_per_node:
        return node
    outside = 1 - chip.gpus_per_node / span
    network = chip.network_gigabytes_per_second * GIGA * rates.network
    return 1 / ((1 - outside) / node + outside / network)


def _optimizer_seconds(spec: ModelSpec, layout: ParallelLayout, inputs: Inputs) -> float:
    bandwidth = inputs.chip.memory_terabytes_per_second * TERA * inputs.rates.copying
    sharded = max(
        held.dense / (layout.data * layout.context) + held.expert / layout.expert_data
        for held in stage_parameters(spec, layout)
    )
    return sharded * inputs.costs.optimizer_traffic_bytes / bandwidth

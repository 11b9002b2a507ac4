"""Memory of a trainer rank, kind by kind."""

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Costs
from ostinato.tasks.planning.shapes import (
    layer_activation_bytes,
    stage_activation_bytes,
    stage_parameters,
)
from ostinato.tasks.planning.workload import TrainingWork

GIB = 2**30


class RankMemory(Record):
    """GiB of one rank of a pipeline stage, at the step's peak."""

    stage: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    reserved_gib: float

    @property
    def total_gib(self) -> float:
        """The sum of all kinds."""
        kinds = self.model_dump(exclude={"stage"})
        return sum(kinds.values())


def stage_memory(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, costs: Costs
) -> tuple[RankMemory, ...]:
    """Memory of a rank, by stage."""
    rows = []
    for stage, held in enumerate(stage_parameters(spec, layout)):
        sharded = held.dense / (layout.data * layout.context) + held.expert / layout.expert_data
        is_last = stage == layout.pipeline - 1
        local = work.microbatch_tokens / layout.context
        # logits, their gradient: fp32
        logits = 8 * local * spec.vocab_size / layout.tensor if is_last else 0.0
        rows.append(
            RankMemory(
                stage=stage,
                weights_gib=costs.weight_bytes * held.all / GIB,
                gradients_gib=costs.gradient_bytes * held.all / GIB,
                optimizer_gib=costs.optimizer_bytes * sharded / GIB,
                activations_gib=_activations(spec, layout, work, stage) / GIB,
                logits_gib=logits / GIB,
                reserved_gib=costs.reserved_gib,
            )
        )
    return tuple(rows)


def _activations(spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, stage: int) -> float:
    """Bytes that wait for backward. Sequence parallelism divides them by the tensor degree too."""
    tokens = work.microbatch_tokens / (layout.tensor * layout.context)
    waiting = min(work.microbatches(layout), _microbatches_in_flight(layout, stage))
    if not work.recompute:
        return tokens * waiting * stage_activation_bytes(spec, layout, stage)
    inputs = 2 * spec.hidden_size * spec.num_layers / layout.pipeline
    one = max(
        layer_activation_bytes(spec, is_dense=is_dense)
        for is_dense in (True, False)
        if (spec.num_dense_layers if is_dense else spec.num_moe_layers)
    )
    return tokens * (waiting * inputs + one)


def _microbatches_in_flight(layout: ParallelLayout, stage: int) -> float:
    """1F1B holds p - stage. Interleaving with v chunks holds p (1 + (p - 1) / (p v)) on the first
    stage (Korthikanti et al. 2022, arXiv 2205.05198).
    """
    stages, chunks = layout.pipeline, layout.interleave
    if chunks == 1:
        return stages - stage
    return stages * (1 + (stages - 1) / (stages * chunks)) - stage

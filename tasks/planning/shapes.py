"""Counts of a model under a layout: parameters of a stage, operations and bytes of a token."""

import functools
import math
import re
from typing import Any

from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import attention_parameters, weight_shapes
from ostinato.tasks.planning.inputs import Costs, TrainingWork

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# a rank has a part of the rows or columns of these matrices, and all other tensors whole
_SPLIT = re.compile(
    r"(embed_tokens|lm_head|[qkvo]_proj|(q|kv)_b_proj|mlp\.gate_up_proj|mlp\.down_proj"
    r"|shared_experts\.(gate_up_proj|down_proj))\.weight$"
)
_EXPERT = re.compile(r"\.experts\.")
EMBEDDING = "model.embed_tokens.weight"


class StageParameters(Record):
    """Parameters that one rank of a pipeline stage holds."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        """Both kinds."""
        return self.dense + self.expert


def stage_of_layer(spec: ModelSpec, layout: ParallelLayout, layer: int) -> int:
    """Pipeline stage of a layer. With interleaving a stage has every p-th chunk. If chunks do not
    divide the layers evenly, the last ones are smaller.
    """
    chunk = math.ceil(spec.num_layers / (layout.pipeline * layout.interleave))
    return layer // chunk % layout.pipeline


def stage_of_tensor(spec: ModelSpec, layout: ParallelLayout, name: str) -> int:
    """Pipeline stage of a weight: its layer's, the first for the embedding, the last for all others."""
    layer = _LAYER.match(name)
    if layer:
        return stage_of_layer(spec, layout, int(layer[1]))
    return 0 if name == EMBEDDING else layout.pipeline - 1


def stage_parameters(spec: ModelSpec, layout: ParallelLayout) -> tuple[StageParameters, ...]:
    """Parameters per rank, by stage. A tied embedding is held by the first and the last stage."""
    # frozen records have a hash, which pydantic does not declare; copies hold the same
    key: Any = (spec, layout.model_copy(update={"data": 1, "context": 1}))
    return _count_parameters(key)


def model_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model, which are counted once."""
    (whole,) = stage_parameters(spec, ParallelLayout())
    return whole.all


@functools.lru_cache(maxsize=1024)  # memory, gradients and optimiser of many layouts need it
def _count_parameters(key: tuple[ModelSpec, ParallelLayout]) -> tuple[StageParameters, ...]:
    spec, layout = key
    last = layout.pipeline - 1
    dense, expert = [0] * layout.pipeline, [0] * layout.pipeline
    for name, shape in weight_shapes(spec).items():
        size = math.prod(shape)
        stage = stage_of_tensor(spec, layout, name)
        if name == EMBEDDING and spec.tied_embeddings and last:
            dense[last] += size // layout.tensor
        if _EXPERT.search(name):
            expert[stage] += size // (layout.expert * layout.expert_tensor)
        else:
            dense[stage] += size // layout.tensor if _SPLIT.search(name) else size
    return tuple(
        StageParameters(dense=one, expert=other) for one, other in zip(dense, expert, strict=True)
    )


class TokenOperations(Record):
    """Floating-point operations of one token's forward pass through the whole model."""

    products: float
    grouped: float
    attention: float

    @property
    def all(self) -> float:
        """The sum."""
        return self.products + self.grouped + self.attention


def token_operations(spec: ModelSpec, row_tokens: float) -> TokenOperations:
    """Two operations per parameter that a token uses. Attention covers half a row on average."""
    hidden, moe = spec.hidden_size, spec.num_moe_layers
    dense = spec.num_layers * attention_parameters(spec)
    dense += spec.num_dense_layers * 3 * hidden * spec.dense_hidden_size
    dense += moe * hidden * (spec.num_experts + 3 * spec.shared_expert_hidden_size)
    grouped = moe * spec.experts_per_token * 3 * hidden * spec.expert_hidden_size
    head = spec.vocab_size * hidden
    return TokenOperations(
        products=2.0 * (dense + head),
        grouped=2.0 * grouped,
        attention=float(spec.num_layers * row_tokens * (spec.query_size + spec.mixed_size)),
    )


def layer_activation_bytes(spec: ModelSpec, *, is_dense: bool) -> int:
    """Bytes in bf16 that one layer saves per token for the backward pass."""
    hidden = spec.hidden_size
    elements = 4 * hidden + spec.query_size + spec.mixed_size
    if spec.latent is None:
        elements += 2 * spec.key_value_size
    else:  # the latents, and the keys and values computed from them
        elements += spec.latent.query_rank + spec.cached_size + spec.query_size + spec.mixed_size
    if is_dense:
        return 2 * (elements + 3 * spec.dense_hidden_size)
    routed = spec.experts_per_token * (2 * hidden + 3 * spec.expert_hidden_size)
    return 2 * (elements + routed + 3 * spec.shared_expert_hidden_size)


def stage_activation_bytes(spec: ModelSpec, layout: ParallelLayout, stage: int) -> int:
    """Bytes that all layers of a stage save per token for the backward pass."""
    held = [
        layer
        for layer in range(spec.num_layers)
        if layout.pipeline == 1 or stage_of_layer(spec, layout, layer) == stage
    ]
    dense = sum(layer < spec.num_dense_layers for layer in held)
    return dense * layer_activation_bytes(spec, is_dense=True) + (
        len(held) - dense
    ) * layer_activation_bytes(spec, is_dense=False)


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

    @property
    def lasting_gib(self) -> float:
        """Memory that stays in use between steps."""
        return self.total_gib - self.activations_gib - self.logits_gib


def stage_memory(
    spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, costs: Costs
) -> tuple[RankMemory, ...]:
    """Memory of a rank, by stage."""
    rows = []
    for stage, held in enumerate(stage_parameters(spec, layout)):
        sharded = held.dense / (layout.data * layout.context) + held.expert / layout.expert_data
        is_last = stage == layout.pipeline - 1
        local = work.microbatch_tokens / layout.context
        # logits and their gradient in fp32
        logits = 8 * local * spec.vocab_size / layout.tensor if is_last else 0.0
        rows.append(
            RankMemory(
                stage=stage,
                weights_gib=work.weight_copies * costs.weight_bytes * held.all / GIB,
                gradients_gib=costs.gradient_bytes * held.all / GIB,
                optimizer_gib=costs.optimizer_bytes * sharded / GIB,
                activations_gib=_activations(spec, layout, work, stage) / GIB,
                logits_gib=logits / GIB,
                reserved_gib=costs.reserved_gib,
            )
        )
    return tuple(rows)


def _activations(spec: ModelSpec, layout: ParallelLayout, work: TrainingWork, stage: int) -> float:
    """Bytes saved for backward. Sequence parallelism also divides them by the tensor degree."""
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
    """Microbatches that a stage holds: p - stage with 1F1B, p (1 + (p - 1) / (p v)) on the first
    stage with v interleaved chunks (Korthikanti et al. 2022, arXiv 2205.05198).
    """
    stages, chunks = layout.pipeline, layout.interleave
    if chunks == 1:
        return stages - stage
    return stages * (1 + (stages - 1) / (stages * chunks)) - stage

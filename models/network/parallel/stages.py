"""A rank's part of a pipeline: its chunks of layers, and tensors gathered from other stages.

As in Megatron, layers are assigned to chunks in order, and chunks to stages in turn: with two
stages of two chunks each, the first stage holds the first and third quarter of the layers. The
first chunk also has the embedding, the last the final norm and the output matrix. If these are
tied, both hold a copy, and Megatron sums the gradients of both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.experts import TrunkConfig


class ChunkGPT(GPTModel):
    """Megatron's GPT model, or a chunk of it, without the product by the output matrix."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks the copy of a tied embedding. Megatron also equalises both copies here, on CUDA;
        ours get their values together with all other weights.
        """
        if self.config.pipeline_model_parallel_size == 1:
            super().setup_embeddings_and_output_layer()
        elif self.share_embeddings_and_output_weights and not self.pre_process:
            copy: Any = self.output_layer.weight
            copy.shared = True  # Megatron's name

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def is_copy(parameter: Tensor) -> bool:
    """Whether a parameter is the last stage's copy of the embedding."""
    return getattr(parameter, "shared", False)


def build_chunks(
    config: TrunkConfig, modules: TransformerBlockSubmodules, **options: Any
) -> torch.nn.ModuleList:
    """This rank's chunks of a model with the layers of `modules`. `options` are Megatron's."""
    per_rank = config.virtual_pipeline_model_parallel_size or 1
    stages = config.pipeline_model_parallel_size
    stage = parallel_state.get_pipeline_model_parallel_rank() if stages > 1 else 0
    layers = modules.layer_specs or []
    size = len(layers) // (stages * per_rank)
    chunks = torch.nn.ModuleList()
    for chunk in range(per_rank):
        number = chunk * stages + stage
        chunks.append(
            ChunkGPT(
                config=config,
                transformer_layer_spec=TransformerBlockSubmodules(  # type: ignore[arg-type]
                    layer_specs=layers[number * size : (number + 1) * size],
                    layer_norm=modules.layer_norm,
                ),
                pre_process=number == 0,
                post_process=number == stages * per_rank - 1,
                vp_stage=chunk if per_rank > 1 else None,
                **options,
            )
        )
    # Megatron has Transformer Engine draw its weights on the CPU
    return chunks if config.engine is None else chunks.to(current_device())


def pipeline_group() -> dist.ProcessGroup:
    """The stages of this rank's pipeline."""
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    return group


def gather_stages(
    mine: Mapping[str, Callable[[], Tensor]], place: Callable[[str], int]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of all stages by name, one at a time on every stage, ordered by `place`.
    `mine` makes those of this stage. All ranks of the pipeline must iterate together.
    """
    group = pipeline_group()
    if group.size() == 1:
        yield from ((name, mine[name]()) for name in sorted(mine, key=place))
        return
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, list(mine), group=group)
    owners = {name: stage for stage in reversed(range(group.size())) for name in names[stage]}
    for name in sorted(owners, key=place):
        source = dist.get_global_rank(group, owners[name])
        tensor = torch.empty(0)
        outline: list[Any] = [None]
        if owners[name] == group.rank():
            tensor = mine[name]().to(current_device()).contiguous()
            outline = [(tuple(tensor.shape), tensor.dtype)]
        dist.broadcast_object_list(outline, source, group=group)
        if owners[name] != group.rank():
            shape, dtype = outline[0]
            tensor = torch.empty(shape, dtype=dtype, device=current_device())
        dist.broadcast(tensor, source, group=group)
        yield name, tensor

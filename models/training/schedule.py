"""Forward and backward passes of a step's microbatches, in the order of Megatron's schedules.

Without a pipeline, microbatches run one after the other; with stages, forward and backward passes
alternate (1F1B), and several chunks per stage are interleaved. States pass between stages in one
shape per step, that of the largest microbatch. All stages read the same microbatches, so each knows
the real number of tokens.

Shapes: B rows, T tokens (of this rank, if a layout splits rows), N = B*T, D model width.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn.functional import pad

from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.network.parallel.context import context_ranks
from ostinato.models.network.parallel.stages import ChunkGPT, pipeline_group
from ostinato.models.training.batch import TokenBatch

# Of a microbatch and its final hidden_TBD: loss summed over targets, and number of targets.
Loss = Callable[[TokenBatch, Tensor], tuple[Tensor, int]]


def run_microbatches(
    model: TrainerModel, batches: Sequence[TokenBatch], loss: Loss, *, has_backward: bool = True
) -> Tensor:
    """Returns (loss, targets) summed over `batches` in fp64, on all stages. Adds to the gradients
    unless `has_backward` is False.
    """
    if not has_backward:
        batches = _fill_rounds(batches)
    places = max(math.prod(batch.computed_shape) for batch in batches)
    forward = functools.partial(_run_forward, model, loss, places)
    run: Any = get_forward_backward_func()
    found = run(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in model.chunks],
        model=list(model.chunks),
        num_microbatches=len(batches),
        seq_length=places,
        micro_batch_size=1,
        forward_only=not has_backward,
    )
    sums = torch.zeros(2, dtype=torch.float64, device=current_device())
    for one in found:  # empty except on the last stage
        sums += one
    if pipeline_group().size() > 1:
        dist.all_reduce(sums, group=pipeline_group())
    return sums


def _fill_rounds(batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """The batches, filled up with batches without a target: interleaved chunks need whole rounds."""
    missing = -len(batches) % pipeline_group().size()
    if not missing:
        return list(batches)
    last = batches[-1]
    empty = replace(last, loss_mask_BT=torch.zeros_like(last.loss_mask_BT))
    return [*batches, *[empty] * missing]


def _run_forward(
    model: TrainerModel, loss: Loss, places: int, batches: Iterator[TokenBatch], chunk: ChunkGPT
) -> tuple[Tensor, Any]:
    """A chunk's output for the next microbatch, and the function that computes the loss from it."""
    batch = next(batches).to(current_device())
    rows, tokens = batch.computed_shape
    parts = context_ranks() * chunk.config.tensor_model_parallel_size
    received_N1D = chunk.decoder.input_tensor
    if received_N1D is not None:
        received_N1D = received_N1D[: tokens // parts * rows]
        chunk.set_input_tensor(received_N1D.view(tokens // parts, rows, -1))
    output_TBD = model.run_chunk(
        chunk,
        batch.tokens_BT,
        batch.routes_BTLK,
        padding_BT=batch.padding_BT,
        plausibility_ratio=batch.plausibility_ratio,
        tree=batch.tree,
    )
    if chunk.post_process:
        return output_TBD, functools.partial(_take_loss, loss, batch)
    output_N1D = output_TBD.reshape(-1, 1, output_TBD.shape[-1])
    return pad(output_N1D, (0, 0, 0, 0, 0, places // parts - len(output_N1D))), None


def _take_loss(loss: Loss, batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its number of targets, and both as one tensor, in the form that Megatron expects."""
    total, targets = loss(batch, hidden_TBD)
    seen = total.detach().double()
    counted = torch.full_like(seen, targets)
    return total, counted.int(), torch.stack((seen, counted))

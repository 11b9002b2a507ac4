"""Perplexity of held-out shards, and their loss in bits per byte, so that tokenizers compare.

Rows of a shard are shared out over data parallelism; every rank returns the same numbers.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
from ostinato.models.rendering import load_renderer
from ostinato.models.training.batch import held_out_batches, held_out_sources
from ostinato.models.training.schedule import run_microbatches
from ostinato.tasks.pretraining.config import Perplexity, PretrainingConfig
from ostinato.tasks.pretraining.loss import next_token_loss


@torch.no_grad()
def measure_perplexity(
    model: TrainerModel, corpus_directory: Path, config: PretrainingConfig, *, step: int
) -> Perplexity:
    """Measures every held-out shard on its first `evaluation_tokens`."""
    names = held_out_sources(corpus_directory)
    missing = sorted(set(config.codebase_sources) - set(names))
    if missing:
        raise ValueError(f"{corpus_directory} has no held-out shard for {missing}, it has {names}")
    lengths_V = _token_lengths(corpus_directory, model.spec.vocab_size)
    sums = torch.zeros(len(names), 3, dtype=torch.float64, device=current_device())
    for index, name in enumerate(names):
        found = held_out_batches(
            corpus_directory, name, config.evaluation_row_tokens, config.evaluation_tokens
        )
        batches = list(found)
        sums[index, :2] = run_microbatches(
            model, batches, next_token_loss(model), has_backward=False
        )
        if parallel_state.get_context_parallel_rank() == 0:  # each has whole rows
            targets = (batch.tokens_BT[batch.loss_mask_BT] for batch in batches)
            sums[index, 2] = sum(int(lengths_V[ids_N].sum()) for ids_N in targets)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    found = dict(zip(names, sums.tolist(), strict=True))
    nats, tokens, num_bytes = (
        sum(found[name][part] for name in config.codebase_sources) for part in range(3)
    )
    by_source = {name: math.exp(one[0] / one[1]) for name, one in found.items()}
    return Perplexity(
        step=step,
        perplexity=math.exp(nats / tokens),
        bits_per_byte=nats / math.log(2) / num_bytes,
        by_source=by_source,
    )


def _token_lengths(corpus_directory: Path, vocab_size: int) -> Tensor:
    """Bytes that each token adds to a text. Control tokens add none."""
    renderer = load_renderer(corpus_directory)
    lengths = [
        0 if renderer.is_control(token_id) else len(renderer.token_bytes(token_id))
        for token_id in range(vocab_size)
    ]
    return torch.tensor(lengths, device=current_device())

"""Perplexity of held-out shards.

Rows of a shard are shared out over data parallelism; every rank returns the same numbers.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel
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
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=current_device())
    for index, name in enumerate(names):
        batches = held_out_batches(
            corpus_directory, name, config.evaluation_row_tokens, config.evaluation_tokens
        )
        sums[index] = run_microbatches(
            model, list(batches), next_token_loss(model), has_backward=False
        )
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    found = dict(zip(names, sums.tolist(), strict=True))
    nats, tokens = (sum(found[name][part] for name in config.codebase_sources) for part in (0, 1))
    by_source = {name: math.exp(one[0] / one[1]) for name, one in found.items()}
    return Perplexity(step=step, perplexity=math.exp(nats / tokens), by_source=by_source)

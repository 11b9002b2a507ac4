"""Child entry of the pretraining stage.

Rank 0 is this process. It starts the other ranks, which join it in process groups.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.training_device import train_on_ranks
from ostinato.models.checkpoint import load_checkpoint, load_spec, save_checkpoint
from ostinato.models.device import current_device
from ostinato.models.network.adapters import attach_adapters, trained_adapter
from ostinato.models.network.build import TrainerModel, build_trainer_model, recompute_layers
from ostinato.models.network.parallel.context import context_rank, data_and_context_group
from ostinato.models.network.transformer_engine import refuse_engine
from ostinato.models.rendering import load_renderer
from ostinato.models.spec import ModelSpec
from ostinato.models.training.batch import TokenBatch, held_out_batches, held_out_sources
from ostinato.models.training.config import PhaseResult
from ostinato.models.training.drafts import draft_divergence
from ostinato.models.training.loop import TrainingRun, Work
from ostinato.models.training.schedule import Loss, run_microbatches
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.pretraining.config import (
    Perplexity,
    PretrainingConfig,
    PretrainingRequest,
    PretrainingResult,
)

CHECKPOINT = "checkpoint"


def main(request: PretrainingRequest, workspace: Workspace) -> PretrainingResult:
    """Trains through all phases. Continues an interrupted run of the same workspace."""
    corpus = Path(request.corpus_directory)
    if not (corpus / "tokenizer.json").exists():
        raise ConfigError(f"corpus_directory={corpus} holds no tokenizer.json, wanted a corpus")
    layout = request.config.parallel_layout
    spec = starting_spec(request)
    with boundary(ConfigError, "pretraining.layout"):
        layout.check(spec)
    return train_on_ranks(train_rank, (request, workspace), spec, layout, "pretraining")


def train_rank(given: tuple[PretrainingRequest, Workspace], rank: int) -> PretrainingResult:
    """Runs the whole stage on one rank. Only rank 0 writes the checkpoint."""
    request, workspace = given
    directory = workspace.directory
    corpus = Path(request.corpus_directory)
    model = open_model(request)

    def evaluate(step: int) -> dict[str, Any]:
        return measure_perplexity(model, corpus, request.config, step=step).model_dump()

    loss = next_token_loss(model, request.draft_weight)
    work = Work(model, loss, evaluate, request.config, corpus)
    run = TrainingRun(work, directory, identity_of(request), workspace.progress.update)
    state = run.run()
    evaluations = tuple(Perplexity(**evaluation) for evaluation in state.evaluations)
    weights = model.export_weights()
    if rank == 0:
        save_checkpoint(
            directory / CHECKPOINT,
            model.spec,
            weights,
            tokenizer_path=corpus / "tokenizer.json",
            metadata={"stage": "pretraining", "codebase_perplexity": evaluations[-1].perplexity},
            adapter=trained_adapter(model),
        )
    return PretrainingResult(
        checkpoint_directory=str(directory / CHECKPOINT),
        num_parameters=num_parameters(model.spec),
        before=evaluations[0],
        after=evaluations[-1],
        evaluations=evaluations,
        phases=tuple(PhaseResult(**phase) for phase in state.phases),
        transcripts_too_long=state.transcripts_too_long,
        times_resumed=state.times_resumed,
    )


def identity_of(request: PretrainingRequest) -> str:
    """Identity of a run. A request continues only resume points with its identity."""
    return request.model_dump_json(exclude=request.placement())


def starting_spec(request: PretrainingRequest) -> ModelSpec:
    """The shape with which training starts."""
    if request.spec is not None:
        return request.spec
    return load_spec(Path(request.checkpoint_directory or ""))


def open_model(request: PretrainingRequest) -> TrainerModel:
    """Builds the model, fresh or from a checkpoint. Draft layers are frozen without a `draft_weight`."""
    config = request.config
    spec = starting_spec(request)
    with boundary(ConfigError, "pretraining.transformer_engine"):
        refuse_engine(current_device(), config.transformer_engine, config.precision, spec)
    options = config.world_size, config.seed, config.precision, config.transformer_engine
    model = build_trainer_model(spec, *options, is_fresh=request.spec is not None)
    if request.checkpoint_directory is not None:
        model.import_weights(load_checkpoint(Path(request.checkpoint_directory)).weights)
    model.draft.requires_grad_(request.draft_weight is not None)
    recompute_layers(model, config.recompute)
    if config.lora is not None:
        attach_adapters(model, config.lora.rank, config.lora.alpha, config.seed)
    return model


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
        if context_rank() == 0:  # every context rank has the whole rows
            targets = (batch.tokens_BT[batch.loss_mask_BT] for batch in batches)
            sums[index, 2] = sum(int(lengths_V[ids_N].sum()) for ids_N in targets)
    dist.all_reduce(sums, group=data_and_context_group())
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


def next_token_loss(model: TrainerModel, draft_weight: float | None = None) -> Loss:
    """Loss of a microbatch from this rank's states: nats summed in fp64, number of targets.

    `draft_weight` is the weight of the draft layers' divergence from the main head. At 0 it is
    added with weight 1 and its gradient stops at the draft layers. None: draft layers do not learn.
    """

    def loss(batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        logprobs_C = model.target_logprobs(hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
        nats = -logprobs_C.sum(dtype=torch.float64)
        if draft_weight is not None:
            rows = hidden_TBD, batch.tokens_BT, batch.loss_mask_BT
            kl_N = draft_divergence(model, *rows, reaches_trunk=draft_weight > 0)
            nats = nats + (draft_weight or 1.0) * kl_N.sum(dtype=torch.float64)
        return nats, len(logprobs_C)

    return loss

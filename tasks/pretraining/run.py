"""Child entry of the pretraining stage.

Rank 0 is this process; the others are started here and meet it in process groups.
"""

from pathlib import Path
from typing import Any

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.training_device import train_on_ranks
from ostinato.models.checkpoint import load_checkpoint, load_spec, save_checkpoint
from ostinato.models.device import current_device
from ostinato.models.network.adapters import attach_adapters, trained_adapter
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.network.transformer_engine import refuse_engine
from ostinato.models.spec import ModelSpec
from ostinato.models.training.config import PhaseConfig, PhaseResult
from ostinato.models.training.loop import TrainingRun, Work
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.pretraining.config import (
    Perplexity,
    PretrainingRequest,
    PretrainingResult,
)
from ostinato.tasks.pretraining.loss import next_token_loss
from ostinato.tasks.pretraining.perplexity import measure_perplexity

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
    """The whole stage as one rank sees it. Rank 0 alone writes what the stage leaves."""
    request, workspace = given
    directory = workspace.directory
    corpus = Path(request.corpus_directory)
    model = open_model(request)

    def evaluate(_: PhaseConfig, step: int) -> dict[str, Any]:
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
        transcripts_too_long=run.transcripts_too_long,
        times_resumed=state.times_resumed,
    )


def identity_of(request: PretrainingRequest) -> str:
    """Name of the run whose resume point a request may continue."""
    return request.model_dump_json(exclude=request.placement())


def starting_spec(request: PretrainingRequest) -> ModelSpec:
    """The shape that training starts from."""
    if request.spec is not None:
        return request.spec
    return load_spec(Path(request.checkpoint_directory or ""))


def open_model(request: PretrainingRequest) -> TrainerModel:
    """Builds the model, fresh or from a checkpoint. Draft layers stay as they are without a `draft_weight`."""
    config = request.config
    spec = starting_spec(request)
    with boundary(ConfigError, "pretraining.transformer_engine"):
        refuse_engine(current_device(), config.transformer_engine, config.precision, spec)
    options = config.world_size, config.seed, config.precision, config.transformer_engine
    model = build_trainer_model(spec, *options, is_fresh=request.spec is not None)
    if request.checkpoint_directory is not None:
        model.import_weights(load_checkpoint(Path(request.checkpoint_directory)).weights)
    model.draft.requires_grad_(request.draft_weight is not None)
    model.recompute_layers(config.recompute)
    if config.lora is not None:
        attach_adapters(model, config.lora.rank, config.lora.alpha, config.seed)
    return model

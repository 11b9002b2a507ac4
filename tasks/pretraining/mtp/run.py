"""Child entry of the MTP stage."""

from pathlib import Path
from typing import Any

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.training_device import train_on_ranks
from ostinato.models.checkpoint import load_checkpoint, load_spec, save_checkpoint
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training.config import PhaseConfig, PhaseResult
from ostinato.models.training.loop import TrainingRun, Work
from ostinato.tasks.pretraining.mtp.config import DraftQuality, MtpRequest, MtpResult
from ostinato.tasks.pretraining.mtp.distillation import distillation_loss, measure_drafts

CHECKPOINT = "checkpoint"


def main(request: MtpRequest, workspace: Workspace) -> MtpResult:
    """Trains draft layers. Continues an interrupted run of the same workspace."""
    corpus = Path(request.corpus_directory)
    if not (corpus / "shards").is_dir():
        raise ConfigError(f"corpus_directory={corpus} holds no shards/, wanted a corpus")
    layout = request.config.parallel_layout
    spec = load_spec(Path(request.checkpoint_directory))
    return train_on_ranks(train_rank, (request, workspace), spec, layout, "mtp")


def train_rank(given: tuple[MtpRequest, Workspace], rank: int) -> MtpResult:
    """The whole stage as one rank sees it. Rank 0 alone writes what the stage leaves."""
    request, workspace = given
    directory = workspace.directory
    corpus = Path(request.corpus_directory)
    start = Path(request.checkpoint_directory)
    model = open_model(request)

    def evaluate(_: PhaseConfig, step: int) -> dict[str, Any]:
        quality = measure_drafts(model, corpus, request.config, step=step)
        return quality.model_dump() | {
            f"kl_nats_{depth}": value for depth, value in enumerate(quality.kl_nats)
        }

    # a frozen trunk keeps its routing too
    config = request.config.model_copy(update={"balance_rate": 0.0})
    work = Work(model, distillation_loss(model), evaluate, config, corpus)
    run = TrainingRun(
        work,
        directory,
        request.model_dump_json(exclude=request.placement()),
        workspace.progress.update,
    )
    state = run.run()
    names = DraftQuality.model_fields
    evaluations = tuple(
        DraftQuality(**{name: evaluation[name] for name in names})
        for evaluation in state.evaluations
    )
    if rank == 0:
        save_checkpoint(
            directory / CHECKPOINT,
            model.spec,
            model.export_weights(),
            tokenizer_path=load_checkpoint(start).tokenizer_path,
            metadata={"stage": "mtp", "agreement": list(evaluations[-1].agreement)},
        )
    return MtpResult(
        checkpoint_directory=str(directory / CHECKPOINT),
        before=evaluations[0],
        after=evaluations[-1],
        evaluations=evaluations,
        phases=tuple(PhaseResult(**phase) for phase in state.phases),
        times_resumed=state.times_resumed,
    )


def open_model(request: MtpRequest) -> TrainerModel:
    """Builds the checkpoint's model. Keeps its draft layers where shapes agree."""
    config = request.config
    checkpoint = load_checkpoint(Path(request.checkpoint_directory))
    spec = checkpoint.spec.model_copy(
        update={"mtp_depth": config.depth, "mtp_hidden_size": config.hidden_size}
    )
    model = build_trainer_model(spec, config.world_size, config.seed, config.precision)
    fresh = model.export_weights()
    kept = {
        name: weight
        for name, weight in checkpoint.weights.items()
        if not name.startswith("model.mtp.")
    }
    if checkpoint.spec.mtp_hidden_size == config.hidden_size:
        kept = {name: weight for name, weight in checkpoint.weights.items() if name in fresh}
    model.import_weights(fresh | kept)
    model.trunk.requires_grad_(False)
    return model

"""Child entry of the MTP stage."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.training_device import train_on_ranks
from ostinato.models.checkpoint import load_checkpoint, load_spec, save_checkpoint
from ostinato.models.device import current_device
from ostinato.models.network.build import TrainerModel, build_trainer_model
from ostinato.models.training.batch import TokenBatch, held_out_batches, held_out_sources
from ostinato.models.training.config import PhaseResult
from ostinato.models.training.drafts import compare_drafts, draft_divergence
from ostinato.models.training.loop import TrainingRun, Work
from ostinato.models.training.schedule import Loss
from ostinato.tasks.pretraining.mtp.config import DraftQuality, MtpConfig, MtpRequest, MtpResult

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
    """Runs the whole stage on one rank. Only rank 0 writes the checkpoint."""
    request, workspace = given
    directory = workspace.directory
    corpus = Path(request.corpus_directory)
    start = Path(request.checkpoint_directory)
    model = open_model(request)

    def evaluate(step: int) -> dict[str, Any]:
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
    """Builds the checkpoint's model. Keeps its draft layers if their width agrees."""
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


def distillation_loss(model: TrainerModel) -> Loss:
    """Loss of a microbatch: KL summed over depths and target tokens, and the targets of depth 0."""

    def loss(batch: TokenBatch, hidden_TBD: Tensor) -> tuple[Tensor, int]:
        kl_N = draft_divergence(model, hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
        return kl_N.sum(), int(batch.loss_mask_BT[:, 2:].sum())

    return loss


@torch.no_grad()
def measure_drafts(
    model: TrainerModel, corpus_directory: Path, config: MtpConfig, *, step: int
) -> DraftQuality:
    """Measures every depth on every held-out shard, with rows divided among the ranks."""
    names = held_out_sources(corpus_directory)
    depths = model.spec.mtp_depth
    sums = torch.zeros(len(names), depths, 3, dtype=torch.float64, device=current_device())
    for index, name in enumerate(names):
        for batch in held_out_batches(
            corpus_directory, name, config.evaluation_row_tokens, config.evaluation_tokens
        ):
            hidden_TBD = model.forward_hidden(batch.tokens_BT)
            found = compare_drafts(model, hidden_TBD, batch.tokens_BT, batch.loss_mask_BT)
            for depth, (kl_C, agrees_C) in enumerate(found):
                sums[index, depth, :2] += torch.stack((kl_C.sum(), agrees_C.sum()))
                sums[index, depth, 2] += len(kl_C)
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    whole = sums.sum(0)
    shares = (sums[:, :, 1] / sums[:, :, 2]).tolist()
    return DraftQuality(
        step=step,
        kl_nats=tuple((whole[:, 0] / whole[:, 2]).tolist()),
        agreement=tuple((whole[:, 1] / whole[:, 2]).tolist()),
        agreement_by_source={name: tuple(share) for name, share in zip(names, shares, strict=True)},
    )

"""Child entry of a cycle's collect, distil and train: users' interactions in, a candidate checkpoint out.

One update per cycle on what the serving checkpoint itself did: the data are on-policy, a second
pass over them would not be. Killed at any moment it starts again from the same window.
"""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import TrainingError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.telemetry import configure_logging, fields
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.tasks.feedback.carry_over import STAGE, carried_baselines, distil_payload
from ostinato.tasks.feedback.collect import collect
from ostinato.tasks.feedback.config import FeedbackConfig
from ostinato.tasks.feedback.distil import distil
from ostinato.tasks.learning.config import LearningConfig, TrainerRequest
from ostinato.tasks.learning.trainer import RLTrainer

logger = logging.getLogger(__name__)


class CycleTrainingRequest(BaseModel):
    """One window of interactions and the checkpoint that made them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cycle_id: str
    from_watermark: int
    to_watermark: int
    checkpoint_directory: str
    feedback: FeedbackConfig
    learning: LearningConfig


class CycleTrainingResult(BaseModel):
    """The candidate and the numbers of its batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_directory: str
    interactions: int
    skipped: int
    samples: int
    mean_reward: float
    reasons: dict[str, int] = Field(description="named reason -> interactions it weighed most for")
    metrics: dict[str, float]


def main(request: CycleTrainingRequest, workspace: Workspace) -> CycleTrainingResult:
    """Collects, distils, trains."""
    configure_logging()
    ledger = Ledger(workspace.settings.ledger_url).migrate()
    objects = open_object_store(workspace.settings)
    workspace.progress.update(0, 3, "collecting")
    collection = collect(ledger, objects, request.from_watermark, request.to_watermark)
    workspace.progress.update(1, 3, "distilling")
    distilled = distil(collection.interactions, carried_baselines(ledger), request.feedback)
    if not distilled.samples:
        raise TrainingError(
            f"cycle {request.cycle_id}: 0 samples in ({request.from_watermark}, {request.to_watermark}], wanted some"
        )
    payload = distil_payload(collection, distilled)
    ledger.cycles.update(request.cycle_id, STAGE, payload)
    workspace.progress.update(2, 3, "training")
    trainer = RLTrainer(
        TrainerRequest(
            config=request.learning,
            checkpoint_directory=request.checkpoint_directory,
            work_directory=str(workspace.directory / "steps"),
            chain_id=f"chain-{request.cycle_id}",
        ),
        objects,
    )
    metrics: dict[str, float] = {}
    if trainer.step == 0:
        metrics = {
            name: value
            for name, value in trainer.train_step(distilled.samples).metrics().items()
            if not isinstance(value, str)
        }
        trainer.publish()
        trainer.save()
    directory = workspace.directory / "checkpoint"
    start = load_checkpoint(Path(request.checkpoint_directory))
    save_checkpoint(
        directory,
        trainer.spec,
        trainer.export_weights(),
        tokenizer_path=start.tokenizer_path,
        metadata={"cycle": request.cycle_id, "parent": request.checkpoint_directory},
    )
    trainer.close()
    workspace.progress.update(3, 3, "candidate is ready")
    logger.info("candidate %s", fields(cycle=request.cycle_id, samples=len(distilled.samples)))
    return CycleTrainingResult(
        checkpoint_directory=str(directory),
        interactions=len(collection.interactions),
        skipped=len(collection.skipped),
        samples=len(distilled.samples),
        mean_reward=distilled.mean_reward,
        reasons=payload["reasons"],
        metrics=metrics,
    )

"""Child entry of a cycle's collect, distil and train: users' interactions in, a candidate checkpoint out.

Each cycle makes one update from interactions of the serving checkpoint, which their recorded checkpoint id proves. So
the data are on-policy, which they would not be in a second pass. After a kill it starts again from the same window.
"""

import contextlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.infra.platform.cluster.workspace import Workspace, replace_text
from ostinato.infra.platform.errors import TrainingError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.platform.training_device import run_on_ranks
from ostinato.models.checkpoint import load_spec
from ostinato.models.device import current_device
from ostinato.models.flushing import flush
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.collect import collect
from ostinato.tasks.realtime.feedback.distil import Distilled, distil
from ostinato.tasks.realtime.feedback.interactions import Collection
from ostinato.tasks.realtime.records import CycleTrainingRequest, CycleTrainingResult
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import TrainerRequest
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer

logger = logging.getLogger(__name__)

StepInputs = tuple[TrainerRequest, ObjectStore, Sequence[Sample], Path, dict[str, str]]

NUMBERS = "numbers.json"  # metrics of the step, next to its checkpoint
DISTIL_STAGE, TRAINING_STAGE = "distil", "training"  # payloads of a cycle in the ledger
_SPEED = "tokens_per_second"


def main(
    request: CycleTrainingRequest, workspace: Workspace, clock: Callable[[], float] = time.time
) -> CycleTrainingResult:
    """Collects, distils, trains. `clock` gives seconds since the epoch."""
    ledger = Ledger(workspace.settings.ledger_url).migrate()
    objects = open_object_store(workspace.settings)
    workspace.progress.update(0, 3, "collecting")
    collection = collect(ledger, objects, request.window)
    workspace.progress.update(1, 3, "distilling")
    distilled = distil(
        collection.interactions, carried_baselines(ledger, request.window.line), request.feedback
    )
    payload = distil_payload(collection, distilled)
    ledger.cycles.update(request.cycle_id, DISTIL_STAGE, payload)
    result = CycleTrainingResult(
        checkpoint_directory=None,
        interactions=len(collection.interactions),
        skipped=len(collection.skipped),
        samples=len(distilled.samples),
        mean_reward=distilled.mean_reward,
        metrics={},
    )
    if not distilled.samples:
        return result
    workspace.progress.update(2, 3, "training")
    directory = workspace.directory / "checkpoint"
    samples = _trim(request, distilled.samples, known_speed(ledger, request.window.line), clock())
    metrics = _train(request, samples, directory, workspace, objects)
    # an earlier process may have taken the step with another number of samples
    num_trained = int(metrics["samples"])
    left_out = max(0, len(distilled.samples) - num_trained)
    training_payload = {_SPEED: metrics[_SPEED], "left_out": left_out}
    ledger.cycles.update(request.cycle_id, TRAINING_STAGE, training_payload)
    details = fields(cycle=request.cycle_id, samples=num_trained, left_out=left_out)
    if left_out:
        logger.warning("candidate of a late cycle, trained on fewer samples %s", details)
    else:
        logger.info("candidate %s", details)
    workspace.progress.update(3, 3, "candidate is ready")
    training = {
        "checkpoint_directory": str(directory),
        "samples": num_trained,
        "left_out": left_out,
        "metrics": metrics,
    }
    return result.model_copy(update=training)


def _trim(
    request: CycleTrainingRequest,
    samples: Sequence[Sample],
    tokens_per_second: float | None,
    now: float,
) -> Sequence[Sample]:
    """The newest samples for which there is time. A late cycle trains on one microbatch."""
    if request.train_until is None:
        return samples
    least, seconds_left = request.learning.packing.microbatch_tokens, request.train_until - now
    if seconds_left <= 0:
        return newest_that_fit(samples, least)
    if tokens_per_second is None:
        return samples
    return newest_that_fit(samples, max(least, seconds_left * tokens_per_second))


def _train(
    request: CycleTrainingRequest,
    samples: Sequence[Sample],
    directory: Path,
    workspace: Workspace,
    objects: ObjectStore,
) -> dict[str, float]:
    """Takes the cycle's step on all ranks and returns its metrics."""
    trainer_request = TrainerRequest(
        config=request.learning,
        checkpoint_directory=request.checkpoint_directory,
        work_directory=str(workspace.directory / "steps"),
        chain_id=f"chain-{request.cycle_id}",
    )
    metadata = {"cycle": request.cycle_id, "parent": request.checkpoint_directory}
    inputs = (trainer_request, objects, samples, directory, metadata), workspace
    spec = load_spec(Path(request.checkpoint_directory))
    layout = request.learning.parallel_layout
    return run_on_ranks(_train_rank, inputs, spec, layout, "the cycle's training")


def _train_rank(inputs: tuple[StepInputs, Workspace], _: int) -> dict[str, float]:
    request, objects, samples, directory, metadata = inputs[0]
    request = request.model_copy(update={"device": current_device().type})
    return take_step(request, objects, samples, directory, metadata)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Finite metrics: JSON has no other numbers. The gate treats a missing k3 as not a number."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def take_step(
    request: TrainerRequest,
    objects: ObjectStore,
    samples: Sequence[Sample],
    directory: Path,
    metadata: dict[str, str],
) -> dict[str, float]:
    """Takes the step if it was not taken yet, and writes the checkpoint. All ranks call it. Returns the step's metrics."""
    metrics_file = Path(request.work_directory) / NUMBERS
    with contextlib.closing(RLTrainer(request, objects)) as trainer:
        if trainer.steps_taken == 0:
            metrics = _finite(trainer.step(samples).metrics())
            if trainer.is_first_rank:
                # written before the checkpoint: a kill in between must not lose a parity alarm, which the gate needs
                metrics_file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(metrics_file, json.dumps(metrics))
                flush(metrics_file)
                flush(metrics_file.parent)
            # saved before it is published: a step taken again would find the samples' version replaced
            # on the chain and could not compare their log-probabilities
            trainer.save()
            trainer.start_publish()
        elif metrics_file.exists():
            metrics = json.loads(metrics_file.read_text())
        else:
            raise TrainingError(
                f"{metrics_file} is missing although the step was taken, wanted the metrics of the step: without them "
                "it is unknown whether there was a parity alarm; end the cycle with `ostinato cycle skip`"
            )
        trainer.export(directory, metadata)
    return metrics


def known_speed(ledger: Ledger, line: str) -> float | None:
    """Training speed of the line's newest closed cycle that trained, in tokens per second. None before the first."""
    for cycle in reversed(ledger.cycles.history(line)):
        speed = cycle.stages.get(TRAINING_STAGE, {}).get(_SPEED)
        if cycle.closed_at is not None and speed:
            return speed
    return None


def newest_that_fit(samples: Sequence[Sample], tokens: float) -> list[Sample]:
    """Samples of the newest interactions with at most `tokens` tokens in total, in order; at least one interaction.

    An interaction is kept or left out as a whole, because its samples share a reward.
    """
    sizes: dict[str, int] = {}
    for sample in samples:
        size = len(sample.segment.token_ids_T)
        sizes[sample.trajectory_id] = sizes.get(sample.trajectory_id, 0) + size
    taken: set[str] = set()
    for interaction, size in reversed(sizes.items()):
        tokens -= size
        if taken and tokens < 0:
            break
        taken.add(interaction)
    return [sample for sample in samples if sample.trajectory_id in taken]


def distil_payload(collection: Collection, distilled: Distilled) -> dict[str, Any]:
    """JSON for `ledger.cycles.update(cycle_id, DISTIL_STAGE, ...)`."""
    return {
        "interactions": len(collection.interactions),
        "skipped": dict(Counter(skip.reason.value for skip in collection.skipped)),
        "samples": len(distilled.samples),
        "mean_reward": distilled.mean_reward,
        "mean_absolute_advantage": distilled.mean_absolute_advantage,
        "reasons": dict(Counter(reward.reason for reward in distilled.rewards)),
        "baselines": distilled.baselines.model_dump(mode="json"),
    }


def carried_baselines(ledger: Ledger, line: str) -> Baselines:
    """Baselines of the line's newest closed cycle that has any. Empty before the first."""
    for cycle in reversed(ledger.cycles.history(line)):
        if cycle.closed_at is not None and DISTIL_STAGE in cycle.stages:
            return Baselines.model_validate(cycle.stages[DISTIL_STAGE]["baselines"])
    return Baselines()

"""Child entry of a cycle's collect, distil and train: users' interactions in, a candidate checkpoint out.

One update per cycle on what the serving checkpoint itself did, by the id that interactions carry:
the data are on-policy, a second pass over them would not be. Killed at any moment it starts again from the same window.
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

Given = tuple[TrainerRequest, ObjectStore, Sequence[Sample], Path, dict[str, str]]

NUMBERS = "numbers.json"  # of the step, beside its checkpoint
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
    # maybe by a run that was killed since and trimmed otherwise
    num_trained = int(metrics["samples"])
    left_out = max(0, len(distilled.samples) - num_trained)
    ledger.cycles.update(request.cycle_id, TRAINING_STAGE, training_payload(metrics, left_out))
    told = fields(cycle=request.cycle_id, samples=num_trained, left_out=left_out)
    if left_out:
        logger.warning("candidate of a late cycle %s: its training was trimmed", told)
    else:
        logger.info("candidate %s", told)
    workspace.progress.update(3, 3, "candidate is ready")
    made = {
        "checkpoint_directory": str(directory),
        "samples": num_trained,
        "left_out": left_out,
        "metrics": metrics,
    }
    return result.model_copy(update=made)


def _trim(
    request: CycleTrainingRequest,
    samples: Sequence[Sample],
    tokens_per_second: float | None,
    now: float,
) -> Sequence[Sample]:
    """What there is time for. A cycle that is late trains on one microbatch."""
    if request.train_until is None:
        return samples
    least = request.learning.packing.microbatch_tokens
    tokens = fitting_tokens(request.train_until - now, tokens_per_second, least)
    return samples if tokens is None else newest_that_fit(samples, tokens)


def _train(
    request: CycleTrainingRequest,
    samples: Sequence[Sample],
    directory: Path,
    workspace: Workspace,
    objects: ObjectStore,
) -> dict[str, float]:
    """Lets a trainer take the step and returns the step's numbers."""
    asked = TrainerRequest(
        config=request.learning,
        checkpoint_directory=request.checkpoint_directory,
        work_directory=str(workspace.directory / "steps"),
        chain_id=f"chain-{request.cycle_id}",
    )
    metadata = {"cycle": request.cycle_id, "parent": request.checkpoint_directory}
    given = (asked, objects, samples, directory, metadata), workspace
    spec = load_spec(Path(request.checkpoint_directory))
    layout = request.learning.parallel_layout
    return run_on_ranks(_train_rank, given, spec, layout, "the cycle's training")


def _train_rank(given: tuple[Given, Workspace], _: int) -> dict[str, float]:
    asked, objects, samples, directory, metadata = given[0]
    asked = asked.model_copy(update={"device": current_device().type})
    return take_step(asked, objects, samples, directory, metadata)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no other numbers. The gate reads a missing k3 as not a number."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def take_step(
    asked: TrainerRequest,
    objects: ObjectStore,
    samples: Sequence[Sample],
    directory: Path,
    metadata: dict[str, str],
) -> dict[str, float]:
    """Takes the one step unless it is taken, and writes the checkpoint, on all ranks together. Returns the step's numbers."""
    kept = Path(asked.work_directory) / NUMBERS
    with contextlib.closing(RLTrainer(asked, objects)) as trainer:
        if trainer.steps_taken == 0:
            metrics = _finite(trainer.step(samples).metrics())
            if trainer.is_first_rank:
                # before the step is saved: a kill in between must not lose an alarm that the gate asks for
                kept.parent.mkdir(parents=True, exist_ok=True)
                replace_text(kept, json.dumps(metrics))
                flush(kept)
                flush(kept.parent)
            # before it is published: a step that is taken again would find the samples' version
            # replaced on the chain, and could not compare them
            trainer.save()
            trainer.start_publish()
        elif kept.exists():
            metrics = json.loads(kept.read_text())
        else:
            raise TrainingError(
                f"{kept} is missing and the step was taken, wanted what the step measured: without it nobody "
                "knows whether the parity alarm was raised; end the cycle with `ostinato cycle skip`"
            )
        trainer.export(directory, metadata)
    return metrics


def training_payload(metrics: Mapping[str, float], left_out: int) -> dict[str, Any]:
    """JSON for `ledger.cycles.update(cycle_id, TRAINING_STAGE, ...)`."""
    return {_SPEED: metrics[_SPEED], "left_out": left_out}


def known_speed(ledger: Ledger, line: str) -> float | None:
    """Tokens per second of the line's newest closed cycle that computed any. None before the first."""
    for cycle in reversed(ledger.cycles.history(line)):
        speed = cycle.stages.get(TRAINING_STAGE, {}).get(_SPEED)
        if cycle.closed_at is not None and speed:
            return speed
    return None


def fitting_tokens(
    seconds_left: float, tokens_per_second: float | None, least: int
) -> float | None:
    """Tokens that training has time for: `least` of them in a cycle that is late. None: all."""
    if seconds_left <= 0:
        return least
    return None if tokens_per_second is None else max(least, seconds_left * tokens_per_second)


def newest_that_fit(samples: Sequence[Sample], tokens: float) -> list[Sample]:
    """The newest interactions of at most so many tokens together, in order, one at least.

    An interaction stays whole: its samples share a reward.
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
    """The baselines of the line's newest closed cycle that has any. Empty before the first."""
    for cycle in reversed(ledger.cycles.history(line)):
        if cycle.closed_at is not None and DISTIL_STAGE in cycle.stages:
            return Baselines.model_validate(cycle.stages[DISTIL_STAGE]["baselines"])
    return Baselines()

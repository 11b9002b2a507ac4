"""One real-time cycle in a process that may be killed at a named call of the ledger. Training and
evaluation are stand-ins; ledger, artifacts and gate are real.

    python -m tests.fakes.cycle_program DIRECTORY CALL RECIPE_TEXT
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ostinato.flows.stages import realtime, stage
from ostinato.infra.platform.ledger.repositories import (
    ArtifactRepository,
    CycleRepository,
    PromotionRepository,
)
from ostinato.tasks.realtime.records import CycleTrainingRequest
from tests.fakes.finished_stages import (
    add_checkpoint,
    add_problems,
    add_scorecard,
    make_scorecard,
    open_context,
)

DISAGREED = {  # what a step says of itself whose engine and trainer differ
    "parity_one_cache_tokens": 310,
    "parity_one_cache_k3_nats": 0.204,
    "parity_alarm_k3": 1e-6,
    "parity_alarm_kept_cache_k3": 1e-3,
    "parity_alarms": 1,
}
_REPOSITORIES: dict[str, type] = {
    "cycles": CycleRepository,
    "artifacts": ArtifactRepository,
    "promotions": PromotionRepository,
}


def run(directory: Path, dies_at: str, text: str, flow_run_id: str = "") -> realtime.CycleReport:
    """The cycle of the recipe "mine"; its home is the one that the environment names."""
    context = open_context(directory, "mine", text)
    problems = add_problems(context, "a")
    trained = add_checkpoint(context, problems, "first")
    add_scorecard(context, problems, trained, 0.5)
    realtime.serving_checkpoint(context, problems, trained)
    real = stage.run_stage

    def stand_in(name: str, entry: str, request: Any, result_type: Any, place: Path) -> BaseModel:
        if isinstance(request, CycleTrainingRequest):
            return _train(request, directory, place, result_type)
        card = make_scorecard(request.checkpoint_name, problems.fingerprint, 0.6)
        kept = place / "trajectories.jsonl"
        place.mkdir(parents=True, exist_ok=True)
        kept.touch()
        return result_type(scorecard=card, rows=(), wall_seconds=1.0, trajectories_path=str(kept))

    stage.run_stage = stand_in  # type: ignore[assignment]
    try:
        if dies_at:
            _die_at(dies_at)
        return realtime.run_cycle(context, problems, trained, flow_run_id)
    finally:
        stage.run_stage = real


def _train(
    request: CycleTrainingRequest, log: Path, place: Path, result_type: type[BaseModel]
) -> BaseModel:
    with (log / "trainings.txt").open("a") as file:
        file.write(f"{request.window.from_watermark}..{request.window.to_watermark}\n")
    (log / "train-until.txt").write_text(str(request.train_until))
    (log / "parity-limit.txt").write_text(str(request.learning.parity.alarm_k3))
    is_empty = (log / "nothing-to-learn").exists()
    checkpoint = place / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "weights").write_text(request.cycle_id)
    return result_type(
        checkpoint_directory=None if is_empty else str(checkpoint),
        interactions=0 if is_empty else 40,
        skipped=40 if is_empty else 0,
        samples=0 if is_empty else 40,
        mean_reward=0.0,
        metrics=DISAGREED if (log / "engine-and-trainer-disagree").exists() else {},
    )


def _die_at(moment: str) -> None:
    is_after = moment.startswith("after ")
    repository, method = moment.removeprefix("after ").split(".")
    real = getattr(_REPOSITORIES[repository], method)

    def die(*arguments: Any, **named: Any) -> None:
        if is_after:
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(_REPOSITORIES[repository], method, die)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

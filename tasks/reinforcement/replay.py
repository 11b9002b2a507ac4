"""Child entries of `ostinato replay` and `ostinato bisect`: steps of a finished run, computed again.

A step is computed from the checkpoint before it and its groups in the journal, by the current code
and settings, and must lead to the recorded weights bit for bit. Another processor or version of
torch gives other bits without any fault, so a replay there is refused.
"""

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ostinato.infra.platform.cluster.workspace import METRICS, Workspace
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.infra.platform.training_device import run_on_ranks
from ostinato.models.checkpoint import load_checkpoint, load_spec
from ostinato.models.device import current_device
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import TrainerRequest, trainer_config
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.step_checkpoints import (
    StepState,
    describe_machine,
    link_step,
    step_directory,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.reinforcement.records import (
    STEPS_FOLDER,
    WEIGHTS,
    ReplayedStep,
    ReplayReport,
    ReplayRequest,
)
from ostinato.tasks.reinforcement.step_samples import StepSamples
from ostinato.tasks.rollout.journal import RolloutJournal


def main(request: ReplayRequest, workspace: Workspace) -> ReplayReport:
    """Computes every requested step."""
    replay = Replay(request, workspace)
    found = []
    for count, step in enumerate(request.steps):
        workspace.progress.update(count, len(request.steps), f"step {step}")
        found.append(replay.step(step))
    return ReplayReport(steps=tuple(found))


def bisect(request: ReplayRequest, workspace: Workspace) -> ReplayReport:
    """Searches for the first step that differs by bisection. This assumes that all later steps differ too."""
    replay = Replay(request, workspace)
    found: dict[int, ReplayedStep] = {}
    low, high = 0, len(request.steps)
    while low < high:
        middle = (low + high) // 2
        step = request.steps[middle]
        workspace.progress.update(len(found), len(request.steps).bit_length(), f"step {step}")
        found[step] = replay.step(step)
        low, high = (middle + 1, high) if found[step].is_equal else (low, middle)
    return ReplayReport(steps=tuple(found.values()))


class Replay:
    """Access to the recorded steps of one run."""

    def __init__(self, request: ReplayRequest, workspace: Workspace) -> None:
        settings = workspace.settings
        self._run, self._metric = request.run, request.metric
        self._workspace = workspace
        self._spec = load_spec(Path(request.run.checkpoint_directory))
        self._steps_directory = Path(request.run_directory) / STEPS_FOLDER
        self._recorded = {
            int(row["step"]): row for row in read_metrics(Path(request.run_directory) / METRICS)
        }
        journal = open_ledger(settings).journal
        self._samples = StepSamples(request.run)
        self._journal = RolloutJournal(journal, open_object_store(settings), request.run.run_id)

    def step(self, step: int) -> ReplayedStep:
        """Computes a step from the checkpoint before it and compares it with the record."""
        recorded = self._recorded_weights(step)
        groups = self._journal.trained(step)
        if not groups:
            raise StorageError(f"{self._run.run_id}: the journal has no group of step {step}")
        learning = self._run.learning
        with tempfile.TemporaryDirectory(prefix="ostinato-replay-") as scratch:
            work = Path(scratch) / "steps"
            if step > 1:
                self._require_checkpoint(step - 1)
                link_step(self._steps_directory, step - 1, work)
            trainer_request = TrainerRequest(
                config=trainer_config(learning, self._run.decoding),
                checkpoint_directory=self._run.checkpoint_directory,
                work_directory=str(work),
                chain_id="replay",
            )
            objects = ObjectStore.from_url(f"file://{scratch}/objects")
            inputs = (trainer_request, objects, self._samples.of(groups)), self._workspace
            layout = learning.parallel_layout
            report, weights = run_on_ranks(_take_step, inputs, self._spec, layout, "replay")
        different = {
            name: float((recorded[name].double() - tensor.double()).abs().max())
            for name, tensor in weights.items()
            if not torch.equal(recorded[name], tensor)
        }
        metrics = self._different_metrics(step, report.metrics())
        return ReplayedStep(
            step=step,
            is_equal=not different if self._metric == WEIGHTS else self._metric not in metrics,
            tensors=len(weights),
            different_tensors=len(different),
            largest_difference=max(different.values(), default=0.0),
            different_metrics=metrics,
        )

    def _recorded_weights(self, step: int) -> dict[str, torch.Tensor]:
        self._require_checkpoint(step)
        checkpoint = load_checkpoint(step_directory(self._steps_directory, step))
        state = StepState.model_validate(checkpoint.metadata)
        here = describe_machine(self._run.learning.world_size)
        if state.computed_on != here:
            raise ConfigError(
                f"{self._run.run_id} step {step}: not comparable, it was computed on "
                f"{state.computed_on!r} and this machine is {here!r}"
            )
        return checkpoint.weights

    def _require_checkpoint(self, step: int) -> None:
        directory = step_directory(self._steps_directory, step)
        if not directory.is_dir():
            raise StorageError(
                f"{self._run.run_id}: the checkpoint of step {step}, {directory}, does not exist; runs with "
                "`--set learning.keep_for_replay=true` keep all of them"
            )

    def _different_metrics(
        self, step: int, replayed: dict[str, float]
    ) -> dict[str, tuple[float, float]]:
        recorded = self._recorded.get(step, {})
        if self._metric not in (WEIGHTS, *_comparable(replayed)) or (
            self._metric != WEIGHTS and self._metric not in recorded
        ):
            wanted = ", ".join(name for name in _comparable(replayed) if name in recorded)
            raise ConfigError(
                f"no metric {self._metric!r} at step {step}, wanted {WEIGHTS}, {wanted}"
            )
        return {
            name: (float(recorded[name]), float(replayed[name]))
            for name in _comparable(replayed)
            if name in recorded and float(recorded[name]) != float(replayed[name])
        }


def _comparable(names: Iterable[str]) -> list[str]:
    """Metrics that depend on the inputs of a step alone. Times are left out, and so are metrics that
    need the weights or the numbers of earlier versions, such as parity and staleness.
    """
    excluded = ("parity", "staleness", "wall", "tokens_per_second", "weight_version", "step")
    return sorted(name for name in names if not name.startswith(excluded))


def _take_step(
    inputs: tuple[tuple[TrainerRequest, ObjectStore, Sequence[Sample]], Workspace], _: int
) -> tuple[StepReport, dict[str, torch.Tensor]]:
    """Takes the next step. Returns its report and the resulting weights."""
    request, objects, samples = inputs[0]
    request = request.model_copy(update={"device": current_device().type})
    with contextlib.closing(RLTrainer(request, objects)) as trainer:
        return trainer.step(samples), trainer.export_weights()

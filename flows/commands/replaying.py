"""`ostinato replay` and `ostinato bisect`: recompute steps of an RL run with today's code."""

import tempfile
from pathlib import Path

from rich.console import Console

from ostinato.flows.reporting.tables import print_table
from ostinato.flows.stages.console import open_console
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import METRICS, REQUEST, RequestEnvelope, read_record
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReplayReport, ReplayRequest

REPLAY = "ostinato.tasks.reinforcement.replay:main"
BISECT = "ostinato.tasks.reinforcement.replay:bisect"


def ask(settings: Settings, run: Path, step: int | None, metric: str, entry: str) -> ReplayReport:
    """Recomputes steps in a child process and returns its report. `step` None: all steps of the run."""
    envelope = read_record(run / REQUEST, RequestEnvelope)
    if envelope is None:
        raise ConfigError(f"{run}: no {REQUEST}, wanted the workspace of an RL run")
    taken = sorted({int(row["step"]) for row in read_metrics(run / METRICS)})
    if step is not None and step not in taken:
        raise ConfigError(f"--step {step}: the run took steps {taken[0]} to {taken[-1]}")
    recorded = ReinforcementRequest.model_validate(envelope.request)
    if step is None and not recorded.learning.keep_for_replay:
        kept = recorded.learning.keep_checkpoints
        raise ConfigError(
            f"{run}: learning.keep_for_replay is false, wanted true: {kept} of {len(taken)} step checkpoints were "
            f"kept; --step {taken[-1]} can be recomputed"
        )
    request = ReplayRequest(
        run=recorded,
        run_directory=str(run),
        steps=tuple(taken) if step is None else (step,),
        metric=metric,
    )
    console = Console(stderr=True)
    with (
        # a new folder each time, because the code may have changed since the last answer
        tempfile.TemporaryDirectory(prefix="ostinato-replay-") as directory,
        console.status("opening the run") as status,
    ):
        return run_child(
            entry,
            request,
            ReplayReport,
            directory=Path(directory),
            on_progress=lambda progress: status.update(f"{progress.message} of {taken[-1]}"),
            settings=settings,
        )


def show(report: ReplayReport) -> None:
    """Prints a row per step."""
    rows = []
    for found in sorted(report.steps, key=lambda found: found.step):
        different = f"{found.different_tensors} of {found.tensors} tensors differ"
        metrics = (
            f"{name} {recorded:.6g} -> {replayed:.6g}"
            for name, (recorded, replayed) in found.different_metrics.items()
        )
        rows.append(
            {
                "step": found.step,
                "weights": different if found.different_tensors else "the same bits",
                "largest difference": f"{found.largest_difference:.3g}",
                "metrics that differ": ", ".join(metrics),
            }
        )
    print_table(open_console(), rows, "recomputed steps")


def conclude(report: ReplayReport, metric: str) -> str:
    """The result in a sentence."""
    first = report.first_different
    if first is None:
        return f"{len(report.steps)} steps, all equal in {metric}"
    return f"first step that differs in {metric}: {first}"

"""Runs of a home as the dashboard shows them: a line in the list, and the page of one with its plots, settings
and attempts.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field

from ostinato.flows.operating.status.rows import StatusRow
from ostinato.flows.recipe_differences import settings_of_run
from ostinato.flows.stages.curves import Curve, panels
from ostinato.flows.stages.declared import START_FILE, StageStart
from ostinato.infra.platform.cluster.workspace import (
    METRICS,
    PROGRESS,
    REQUEST,
    Progress,
    RequestEnvelope,
    read_record,
)
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import JournalRow, JournalState
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.record import Record, dotted
from ostinato.infra.platform.telemetry import GrowingMetrics
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.payload import group_from_bytes

MAX_RUNS = 500
MAX_STEPS = 2_000  # points of a curve
MAX_LINES = 5_000  # of the table of attempts
_KEPT_GROUPS = 4_000  # of which a process keeps the lines
_HEADLINES = ("evaluation_average", "solve_rate", "loss")  # the first that a run measures


class RunSummary(Record):
    """One stage with metrics, as a line of the list."""

    run: str = Field(description="folder below runs/, such as nano-seed0/reinforced-0a1b2c3d")
    recipe: str
    seed: str
    stage: str = Field(description="kind of the artifact that the stage makes")
    state: str
    steps: float = Field(description="finished steps")
    total_steps: float
    headline: str = Field(
        description="name of the metric in `value`; empty: none of the known ones"
    )
    value: float | None
    began_at: float | None = Field(description="seconds since the epoch; None: unknown")
    changed_at: float
    flow_run_id: str | None = Field(description="id of the flow run in Prefect; None: unknown")


class RunPage(Record):
    """One run in full."""

    run: str
    curves: tuple[Curve, ...]
    settings: dict[str, Any] = Field(description="dotted name -> value, without paths and run id")
    recipe: dict[str, Any] = Field(description="dotted name -> value; empty: not kept")


def list_runs(home: Path, parts: Mapping[str, StatusRow]) -> list[RunSummary]:
    """Stages that wrote metrics, newest first. `parts`: rows of `ostinato status` by part."""
    found = sorted(_stages(home), key=lambda path: -changed_at(path / METRICS))
    return [_summary(path, parts) for path in found[:MAX_RUNS]]


def _stages(home: Path) -> Iterator[Path]:
    return (path.parent for path in home.glob(f"runs/*/*/{METRICS}"))


def changed_at(path: Path) -> float:
    """When a file last changed. 0 if it was removed meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _summary(directory: Path, parts: Mapping[str, StatusRow]) -> RunSummary:
    name, folder = directory.parent.name, directory.name
    progress = read_record(directory / PROGRESS, Progress)
    start = read_record(directory / START_FILE, StageStart)
    row = parts.get(f"{name} {folder}")
    recipe, _, seed = name.rpartition("-seed")
    numbers = {} if progress is None else progress.metrics
    headline = next((metric for metric in _HEADLINES if metric in numbers), "")
    value = numbers.get(headline)
    return RunSummary(
        run=f"{name}/{folder}",
        recipe=recipe,
        seed=seed,
        stage=folder.rpartition("-")[0] or folder,
        state="unknown" if row is None else row.state,
        steps=0.0 if progress is None else progress.done,
        total_steps=0.0 if progress is None else progress.total,
        headline=headline,
        value=value if isinstance(value, float | int) else None,  # text: not finite
        began_at=None if start is None else start.began_at,
        changed_at=changed_at(directory / METRICS),
        flow_run_id=None if start is None else start.flow_run_id,
    )


def find_run(home: Path, run: str) -> Path | None:
    """Directory of a run. None: the home has no such run, so names with `..` find nothing."""
    return next((path for path in _stages(home) if f"{path.parent.name}/{path.name}" == run), None)


def find_run_id(home: Path, run_id: str) -> str | None:
    """The run whose folder has this name. None: no run has it."""
    found = (path for path in _stages(home) if path.name == run_id)
    return next((f"{path.parent.name}/{path.name}" for path in found), None)


def read_run(directory: Path) -> RunPage:
    """Plots and settings of a run."""
    envelope = read_record(directory / REQUEST, RequestEnvelope)
    settings = {} if envelope is None else dict(dotted(envelope.request))
    return RunPage(
        run=f"{directory.parent.name}/{directory.name}",
        curves=tuple(panels(_metrics_of(directory).thinned(MAX_STEPS))),
        settings={name: value for name, value in settings.items() if not _is_place(name)},
        recipe=settings_of_run(directory),
    )


@lru_cache(maxsize=64)
def _metrics_of(directory: Path) -> GrowingMetrics:
    return GrowingMetrics(directory / METRICS)


def _is_place(name: str) -> bool:
    return name == "run_id" or name.endswith(("_directory", "_directories"))


class AttemptLine(Record):
    """One attempt. Fields from `solved` on are None when its group is not stored."""

    trajectory_id: str
    group_id: str
    problem_id: str
    step: int | None = Field(description="step that trained on it; None: none yet")
    state: str = Field(description="state in the journal")
    outcome: str | None
    reward: float | None
    weight_version: int = Field(description="version of the weights at its start")
    solved: bool | None = None
    turns: int | None = None
    calls: int | None = None
    tokens: int | None = Field(default=None, description="sampled tokens")
    seconds: float | None = None


class AttemptTable:
    """Reader of a home's attempts. Stored groups never change, so each is read once."""

    def __init__(self, ledger: Ledger, objects: ObjectStore) -> None:
        self._ledger, self._objects = ledger, objects
        self._stored: dict[str, dict[str, dict[str, Any]]] = {}  # by key and attempt

    def lines(self, run_id: str) -> list[AttemptLine]:
        """The newest MAX_LINES ended attempts of a run, newest first."""
        rows = self._ledger.journal.rows(run_id)
        ended = [row for row in rows if row.state is not JournalState.RESERVED]
        return list(self._lines(ended[-MAX_LINES:]))[::-1]

    def _lines(self, rows: Sequence[JournalRow]) -> Iterator[AttemptLine]:
        for key, members in groupby(rows, key=lambda row: row.object_key):
            stored = {} if key is None else self._read(key)
            for row in members:
                yield AttemptLine(
                    trajectory_id=row.trajectory_id,
                    group_id=row.group_id,
                    problem_id=row.problem_id,
                    step=row.trained_step,
                    state=row.state.value,
                    outcome=row.outcome,
                    reward=row.reward,
                    weight_version=row.weight_version,
                    **stored.get(row.trajectory_id, {}),
                )

    def _read(self, key: str) -> dict[str, dict[str, Any]]:
        if key not in self._stored:
            if not self._objects.exists(key):
                return {}
            group = group_from_bytes(self._objects.get_bytes(key))
            if len(self._stored) >= _KEPT_GROUPS:
                self._stored.clear()
            self._stored[key] = {one.trajectory_id: _measures(one) for one in group.trajectories}
        return self._stored[key]


def _measures(attempt: Trajectory) -> dict[str, Any]:
    turns = attempt.transcript.turns
    return {
        "solved": attempt.is_solved,
        "turns": len(turns),
        "calls": sum(len(turn.calls) for turn in turns),
        "tokens": sum(turn.generated_tokens for turn in turns),
        "seconds": attempt.finished_at - attempt.started_at,
    }

"""Child entry of evaluation: a checkpoint on problems, with training's worker, harness and engine.

Each shard is a process with its own engine, boxes and file of finished attempts (`shard`). This
process loads no engine, so that those of the shards start at once.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ostinato.infra.platform.cluster.workspace import Progress, Workspace
from ostinato.infra.platform.telemetry import MetricsLog, configure_logging
from ostinato.tasks.evaluation.attempts import (
    SOLVED,
    TRAJECTORIES_FILE,
    AttemptRow,
    plan_of,
    read_rows,
    read_trajectories,
    report_progress,
    run_shards,
)
from ostinato.tasks.evaluation.checkpoint.records import (
    EvaluationRequest,
    EvaluationResult,
    ShardRequest,
    ShardResult,
)
from ostinato.tasks.evaluation.statistics import scorecard_from
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.problems.suites import assign_slices, read_card
from ostinato.tasks.records import Scorecard

SHARD_ENTRY = "ostinato.tasks.evaluation.checkpoint.shard:run_shard"


def main(request: EvaluationRequest, workspace: Workspace) -> EvaluationResult:
    """Runs all shards at once and scores their rows."""
    configure_logging()
    started_at = time.monotonic()
    plan = plan_of(request)
    count = min(request.processes, len({item.problem.problem_id for item in plan}))

    def report(newest: Sequence[Progress]) -> None:
        done = sum(one.done for one in newest)
        solved = sum(float(one.metrics[SOLVED]) for one in newest)
        report_progress(workspace, done, len(plan), solved)

    requests = [
        ShardRequest(evaluation=request, index=index, count=count) for index in range(count)
    ]
    rows: list[AttemptRow] = []
    kept = MetricsLog(workspace.directory / TRAJECTORIES_FILE)
    kept.path.unlink(missing_ok=True)
    for shard in run_shards(SHARD_ENTRY, requests, ShardResult, workspace, report):
        rows_path = Path(shard.rows_path)
        rows += read_rows(rows_path)
        for number, texts in enumerate(read_trajectories(rows_path.with_name(TRAJECTORIES_FILE))):
            kept.append(number, texts)
    kept.close()
    return EvaluationResult(
        scorecard=make_scorecard(request, rows),
        rows=tuple(rows),
        trajectories_path=str(kept.path),
        wall_seconds=time.monotonic() - started_at,
    )


def make_scorecard(request: EvaluationRequest, rows: Iterable[AttemptRow]) -> Scorecard:
    """The scorecard of all rows, with slices for a suite."""
    directory, slices = Path(request.problems_directory), None
    if request.split is None:
        slices = assign_slices(load_problems(directory), read_card(directory).slices)
    return scorecard_from(
        rows,
        suite=request.suite or f"{request.split}",
        checkpoint=request.checkpoint_name,
        temperature=request.config.temperature,
        confidence=request.config.confidence,
        slices=slices,
    )

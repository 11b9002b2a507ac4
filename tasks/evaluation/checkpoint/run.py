"""Child entry of evaluation: a checkpoint on problems, through training's worker, harness and engine.

Shards do the work, each a process with its own engine, boxes and file of finished attempts (`shard`). This
process loads no engine, so that theirs start at once.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ostinato.infra.platform.cluster.child import run_child
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
)
from ostinato.tasks.evaluation.checkpoint.records import (
    EvaluationRequest,
    EvaluationResult,
    ShardRequest,
    ShardResult,
)
from ostinato.tasks.evaluation.statistics import scorecard_from
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Scorecard

SHARD_ENTRY = "ostinato.tasks.evaluation.checkpoint.shard:run_shard"


def main(request: EvaluationRequest, workspace: Workspace) -> EvaluationResult:
    """Runs all shards at once and scores their rows."""
    configure_logging()
    started_at = time.monotonic()
    plan = plan_of(request, load_problems(Path(request.problems_directory)))
    count = min(request.processes, len({item.problem.problem_id for item in plan}))
    report = _progress_of(workspace, count, len(plan))
    with ThreadPoolExecutor(count) as threads:
        shards = [
            threads.submit(_supervise, request, index, count, workspace, report[index])
            for index in range(count)
        ]
        rows: list[AttemptRow] = []
        kept = MetricsLog(workspace.directory / TRAJECTORIES_FILE)
        kept.path.unlink(missing_ok=True)
        for shard in shards:
            rows_path = Path(shard.result().rows_path)
            rows += read_rows(rows_path)
            for number, texts in enumerate(
                read_trajectories(rows_path.with_name(TRAJECTORIES_FILE))
            ):
                kept.append(number, texts)
    kept.close()
    return EvaluationResult(
        scorecard=make_scorecard(request, rows),
        rows=tuple(rows),
        trajectories_path=str(kept.path),
        wall_seconds=time.monotonic() - started_at,
    )


def _supervise(
    request: EvaluationRequest,
    index: int,
    count: int,
    workspace: Workspace,
    on_progress: Callable[[Progress], None],
) -> ShardResult:
    return run_child(
        SHARD_ENTRY,
        ShardRequest(evaluation=request, index=index, count=count),
        ShardResult,
        directory=workspace.directory / f"shard{index}of{count}",
        on_progress=on_progress,
        settings=workspace.settings,
    )


def _progress_of(workspace: Workspace, count: int, total: int) -> list[Callable[[Progress], None]]:
    """One listener per shard. Together they report the progress of the whole."""
    done, solved = [0.0] * count, [0.0] * count

    def listener(index: int) -> Callable[[Progress], None]:
        def listen(progress: Progress) -> None:
            done[index] = progress.done
            solved[index] = float(progress.metrics[SOLVED])
            report_progress(workspace, sum(done), total, sum(solved))

        return listen

    return [listener(index) for index in range(count)]


def make_scorecard(request: EvaluationRequest, rows: Iterable[AttemptRow]) -> Scorecard:
    """The scorecard of all rows."""
    return scorecard_from(
        rows,
        suite=request.suite or request.split.value,
        checkpoint=request.checkpoint_name,
        temperature=request.config.temperature,
        confidence=request.config.confidence,
    )

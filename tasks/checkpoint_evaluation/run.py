"""Child entry of evaluation: a checkpoint on problems, through training's worker, harness and engine.

Each shard is a process with its own engine, boxes and file of finished attempts.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from ostinato.infra.agent.endpoint import Endpoint, open_client, probe
from ostinato.infra.agent.loop.outside import run_agent_outside
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import Progress, Workspace
from ostinato.infra.platform.telemetry import MetricsLog, configure_logging, fields
from ostinato.infra.serving.engine.start import load_engine
from ostinato.tasks.checkpoint_evaluation.records import (
    EvaluationRequest,
    EvaluationResult,
    ShardRequest,
    ShardResult,
)
from ostinato.tasks.evaluation.attempts import (
    INFRASTRUCTURE_OUTCOMES,
    TRAJECTORIES_FILE,
    AttemptFunction,
    AttemptRow,
    CheckEngine,
    draw_problems,
    plan_attempts,
    read_rows,
    read_trajectories,
    run_attempts,
)
from ostinato.tasks.evaluation.locating import (
    LocatingRow,
    locating_row,
    read_locating,
)
from ostinato.tasks.evaluation.statistics import scorecard_from
from ostinato.tasks.graded_worker import WorkerSetup, build_worker, token_dialogue
from ostinato.tasks.problem_sets import load_problems
from ostinato.tasks.records import Problem, Scorecard, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.worker import Converse

logger = logging.getLogger(__name__)

SHARD_ENTRY = "ostinato.tasks.checkpoint_evaluation.run:run_shard"
ROWS_FILE = "rows.jsonl"
LOCATING_FILE = "locating.jsonl"
_SOLVED = "solved_attempts"  # metric


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
        locating: list[LocatingRow] = []
        for shard in shards:
            rows_path = Path(shard.result().rows_path)
            rows += read_rows(rows_path)
            for number, texts in enumerate(
                read_trajectories(rows_path.with_name(TRAJECTORIES_FILE))
            ):
                kept.append(number, texts)
            locating += read_locating(rows_path.with_name(LOCATING_FILE))
    kept.close()
    return EvaluationResult(
        scorecard=score(request, rows),
        rows=tuple(rows),
        locating=tuple(locating),
        trajectories_path=str(kept.path),
        wall_seconds=time.monotonic() - started_at,
    )


def run_shard(request: ShardRequest, workspace: Workspace) -> ShardResult:
    """One process: an engine, boxes, and the attempts of this shard."""
    configure_logging()
    evaluation = request.evaluation
    plan = plan_of(evaluation, load_problems(Path(evaluation.problems_directory)))
    mine = shard_of(plan, index=request.index, count=request.count)
    rows_path = workspace.directory / ROWS_FILE
    asyncio.run(_run_attempts(request, mine, rows_path, workspace))
    return ShardResult(rows_path=str(rows_path), attempts=len(mine))


async def _run_attempts(
    request: ShardRequest,
    plan: list[AttemptRequest],
    rows_path: Path,
    workspace: Workspace,
) -> None:
    evaluation = request.evaluation
    setup = WorkerSetup(
        tokenizer_directory=evaluation.checkpoint_directory,
        problems_directory=evaluation.problems_directory,
        harness=evaluation.harness,
        grading=evaluation.grading,
        concurrent_trajectories=evaluation.engine_slots,
        sandbox=evaluation.sandbox,
        search_directory=evaluation.search_directory,
    )
    async with _dialogue(request, setup) as converse:
        worker = build_worker(setup, converse)
        attempt = worker.attempt
        if evaluation.notes_locating:
            attempt = _noting(attempt, rows_path.with_name(LOCATING_FILE))
        try:
            await run_attempts(
                plan,
                attempt,
                rows_path=rows_path,
                concurrent_attempts=evaluation.engine_slots,
                on_row=lambda rows: _tell(
                    workspace, len(rows), len(plan), sum(row.solved for row in rows)
                ),
                check_engine=_check_of(evaluation.endpoint),
            )
        finally:
            await worker.close()
    logger.info("shard is done %s", fields(index=request.index, attempts=len(plan)))


def _check_of(endpoint: Endpoint | None) -> CheckEngine | None:
    """Asks whether the endpoint still answers. None: the engine is of this process."""
    return None if endpoint is None else lambda: asyncio.to_thread(probe, endpoint)


@asynccontextmanager
async def _dialogue(request: ShardRequest, setup: WorkerSetup) -> AsyncIterator[Converse]:
    """How attempts talk with the model: through an engine of this process, or at its endpoint."""
    evaluation = request.evaluation
    if evaluation.endpoint is not None:
        async with open_client(evaluation.endpoint) as client:
            yield partial(run_agent_outside, client, evaluation.endpoint.model)
        return
    engine = load_engine(
        Path(evaluation.checkpoint_directory),
        f"evaluation{request.index}",
        evaluation.decoding,
        slots=evaluation.engine_slots,
        max_context_tokens=evaluation.context_tokens,
    )
    try:
        yield token_dialogue(setup, engine)
    finally:
        engine.close()


def _noting(attempt: AttemptFunction, path: Path) -> AttemptFunction:
    """The same attempts, each leaving a line about how it found its function."""
    log = MetricsLog(path)

    async def noted(item: AttemptRequest) -> Trajectory:
        trajectory = await attempt(item)
        if trajectory.outcome not in INFRASTRUCTURE_OUTCOMES:  # those are made again
            row = locating_row(item.problem, trajectory)
            log.append(item.attempt, row.model_dump(mode="json"))
        return trajectory

    return noted


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
    """One listener a shard. Together they tell the whole."""
    done, solved = [0.0] * count, [0.0] * count

    def listener(index: int) -> Callable[[Progress], None]:
        def listen(progress: Progress) -> None:
            done[index] = progress.done
            solved[index] = float(progress.metrics[_SOLVED])
            _tell(workspace, sum(done), total, sum(solved))

        return listen

    return [listener(index) for index in range(count)]


def _tell(workspace: Workspace, done: float, total: int, solved: float) -> None:
    message = f"attempts, solve rate {solved / done:.2f}"
    workspace.progress.update(done, total, message, **{_SOLVED: solved})


def plan_of(request: EvaluationRequest, problems: Iterable[Problem]) -> list[AttemptRequest]:
    """All attempts of a request."""
    wanted = [problem for problem in problems if problem.split is request.split]
    drawn = draw_problems(wanted, count=request.config.problems, seed=request.config.seed)
    return plan_attempts(
        drawn,
        attempts_per_problem=request.config.attempts_per_problem,
        seed=request.config.seed,
        temperature=request.config.temperature,
    )


def shard_of(plan: Sequence[AttemptRequest], *, index: int, count: int) -> list[AttemptRequest]:
    """The attempts of one shard. All attempts at a problem stay together, so that verdicts are cached once."""
    names = list(dict.fromkeys(item.problem.problem_id for item in plan))
    mine = set(names[index::count])
    return [item for item in plan if item.problem.problem_id in mine]


def score(request: EvaluationRequest, rows: Iterable[AttemptRow]) -> Scorecard:
    """The scorecard of all rows."""
    return scorecard_from(
        rows,
        suite=request.suite or request.split.value,
        checkpoint=request.checkpoint_name,
        temperature=request.config.temperature,
        confidence=request.config.confidence,
    )

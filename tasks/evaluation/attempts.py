"""Attempts of an evaluation: each attempt number of each problem, exactly once, in one process per shard.

Finished attempts are JSON lines in a file, so that a killed evaluation resumes.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import Progress, Workspace
from ostinato.infra.platform.errors import GradingError, ProblemError
from ostinato.infra.platform.telemetry import MetricsLog, read_lines
from ostinato.models.decode.protocol import Priority
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest
from ostinato.tasks.evaluation.statistics import AttemptRow, attempt_row
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Outcome, Problem, Split, Trajectory
from ostinato.tasks.rollout.attempted_problems import choose_attempted
from ostinato.tasks.rollout.records import AttemptRequest

INFRASTRUCTURE_OUTCOMES = frozenset({Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED})
INFRASTRUCTURE_RETRIES = 2
_FAULTS_LIMIT = 16
EVALUATION = "evaluation"  # prefix of its attempts' ids
# beside the rows: whole trajectories without token arrays
TRAJECTORIES_FILE = "trajectories.jsonl"


AttemptFunction = Callable[[AttemptRequest], Awaitable[Trajectory]]
OnRow = Callable[[Sequence[AttemptRow]], None]  # gets all finished rows
CheckEngine = Callable[[], Awaitable[None]]
Result = TypeVar("Result", bound=BaseModel)


def draw_problems(problems: Sequence[Problem], *, count: int, seed: int) -> list[Problem]:
    """At most `count` problems. The same seed draws the same problems, whatever their order."""
    ordered = sorted(problems, key=lambda problem: problem.problem_id)
    if len(ordered) <= count:
        return ordered
    return random.Random(f"evaluation:{seed}").sample(ordered, count)


def plan_attempts(
    problems: Sequence[Problem], *, attempts_per_problem: int, seed: int, temperature: float = 1.0
) -> list[AttemptRequest]:
    """All attempts. A seed depends on problem and attempt number only."""
    return [
        AttemptRequest(
            trajectory_id=f"{EVALUATION}.{problem.problem_id}.t{attempt}",
            group_id=f"{EVALUATION}.{problem.problem_id}",
            problem=problem,
            attempt=attempt,
            retry=0,
            seed=random.Random(f"{seed}:{problem.problem_id}:{attempt}").getrandbits(48),
            temperature=temperature,
            priority=Priority.EVALUATION,
        )
        for problem in problems
        for attempt in range(attempts_per_problem)
    ]


def read_rows(path: Path) -> list[AttemptRow]:
    """Finished attempts of a file."""
    rows: dict[tuple[str, int], AttemptRow] = {}
    for values in read_lines(path):
        values.pop("step")
        row = AttemptRow.model_validate(values)
        rows.setdefault((row.problem_id, row.attempt), row)
    return list(rows.values())


def read_trajectories(path: Path) -> list[dict[str, Any]]:
    """Trajectories of a file, the newest of each attempt."""
    found = {(row["problem_id"], row["attempt"]): row for row in read_lines(path)}
    return list(found.values())


async def run_attempts(
    plan: Sequence[AttemptRequest],
    attempt: AttemptFunction,
    *,
    rows_path: Path,
    concurrent_attempts: int,
    on_row: OnRow | None = None,
    check_engine: CheckEngine | None = None,
) -> list[AttemptRow]:
    """Runs the attempts that the file does not hold yet. Returns all rows, finished before or now.
    `check_engine` is called when the last retry of an attempt ended as engine_failed. If it raises,
    the evaluation ends; otherwise the attempt counts as not solved. If it is None, the evaluation
    ends with a GradingError. It also does if the first attempts all end by faults.
    """
    rows = read_rows(rows_path)
    finished = {(row.problem_id, row.attempt) for row in rows}
    left = [item for item in plan if (item.problem.problem_id, item.attempt) not in finished]
    waiting = iter(left)
    ended: list[bool] = []  # whether by a fault
    log = MetricsLog(rows_path)
    texts = MetricsLog(rows_path.with_name(TRAJECTORIES_FILE))

    async def drain() -> None:
        for item in waiting:
            trajectory = await _attempt_with_retries(item, attempt, check_engine)
            ended.append(trajectory.is_fault)
            if all(ended) and len(ended) == min(len(left), _FAULTS_LIMIT):
                fault = (
                    trajectory.reason if trajectory.verdict is None else trajectory.verdict.detail
                )
                raise GradingError(
                    f"all of the first {len(ended)} attempts ended by a fault, wanted a graded one: "
                    f"{fault}"
                )
            row = attempt_row(trajectory, item.problem)
            kept = trajectory.model_dump(mode="json", exclude={"transcript": {"segments"}})
            texts.append(len(rows), kept)
            log.append(len(rows), row.model_dump(mode="json"))
            rows.append(row)
            if on_row is not None:
                on_row(rows)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrent_attempts):
                tasks.create_task(drain())
    except ExceptionGroup as errors:  # the first is the cause, the others were cancelled
        raise errors.exceptions[0] from None
    finally:
        log.close()
        texts.close()
    return rows


async def _attempt_with_retries(
    item: AttemptRequest, attempt: AttemptFunction, check_engine: CheckEngine | None
) -> Trajectory:
    trajectory = await attempt(item)
    while trajectory.outcome in INFRASTRUCTURE_OUTCOMES:
        if item.retry >= INFRASTRUCTURE_RETRIES:
            if trajectory.outcome is Outcome.ENGINE_FAILED and check_engine is not None:
                await check_engine()
                return trajectory
            raise GradingError(
                f"attempt {item.attempt} at problem {item.problem.problem_id} ended as "
                f"{trajectory.outcome.value} {item.retry + 1} times, wanted a graded attempt: "
                f"{trajectory.reason}"
            )
        retry = item.retry + 1
        again = f"{EVALUATION}.{item.problem.problem_id}.t{item.attempt}.r{retry}"
        item = replace(item, retry=retry, trajectory_id=again)
        trajectory = await attempt(item)
    return trajectory


SOLVED = "solved_attempts"  # metric


def load_split(problems_directory: str, split: Split | None) -> list[Problem]:
    """The problems of a split, or all those of a suite (None). Raises ProblemError if there are none."""
    wanted = load_problems(Path(problems_directory), split)
    if not wanted:
        raise ProblemError(
            f"{problems_directory} holds 0 problems of {f'split {split}' if split else 'a suite'}, wanted at least 1; "
            "make some ([problems.sizes], or `split` of a source), or evaluate on another suite"
        )
    return wanted


def plan_of(request: EvaluationRequest) -> list[AttemptRequest]:
    """All attempts of a request. Raises ProblemError if the split has no problems."""
    wanted = load_split(request.problems_directory, request.split)
    wanted = choose_attempted(wanted, request.harness, request.sandboxes)
    drawn = draw_problems(wanted, count=request.config.problems, seed=request.config.seed)
    return plan_attempts(
        drawn,
        attempts_per_problem=request.config.attempts_per_problem,
        seed=request.config.seed,
        temperature=request.config.temperature,
    )


def shard_of(plan: Sequence[AttemptRequest], *, index: int, count: int) -> list[AttemptRequest]:
    """The attempts of one shard. All attempts at a problem are in one shard, where verdicts are cached."""
    names = list(dict.fromkeys(item.problem.problem_id for item in plan))
    mine = set(names[index::count])
    return [item for item in plan if item.problem.problem_id in mine]


def run_shards(
    entry: str,
    requests: Sequence[BaseModel],
    result: type[Result],
    workspace: Workspace,
    on_progress: Callable[[Sequence[Progress]], None],
) -> list[Result]:
    """Results in the order of the requests, each from its own process in `shardIofN` of the
    workspace. `on_progress` gets the newest progress of each shard that has reported any.
    """
    count = len(requests)
    newest: dict[int, Progress] = {}

    def run(index: int) -> Result:
        def listen(progress: Progress) -> None:
            newest[index] = progress
            on_progress(list(newest.values()))

        return run_child(
            entry,
            requests[index],
            result,
            directory=workspace.directory / f"shard{index}of{count}",
            on_progress=listen,
            settings=workspace.settings,
        )

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def report_progress(workspace: Workspace, done: float, total: int, solved: float) -> None:
    """Shows the number of finished attempts, at least one, of `total`, and the solve rate so far."""
    message = f"attempts, solve rate {solved / done:.2f}"
    workspace.progress.update(done, total, message, **{SOLVED: solved})

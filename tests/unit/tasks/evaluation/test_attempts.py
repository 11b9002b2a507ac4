"""The plan of an evaluation and its resumption, with scripted attempts."""

from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, GradingError, ProblemError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.evaluation.attempts import (
    TRAJECTORIES_FILE,
    draw_problems,
    plan_attempts,
    read_rows,
    read_trajectories,
    run_attempts,
    shard_of,
)
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest
from ostinato.tasks.evaluation.checkpoint.run import main
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.records import Outcome, Split, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory

PROBLEMS = [make_problem(f"p{index}") for index in range(6)]


def trajectory_of(item: AttemptRequest, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    return make_trajectory(item, outcome=outcome, solved=item.attempt == 0)


class Attempts:
    """Counts attempts; stops working after `limit`."""

    def __init__(self, limit: int = 1000) -> None:
        self.made: list[tuple[str, int]] = []
        self.limit = limit

    async def __call__(self, item: AttemptRequest) -> Trajectory:
        if len(self.made) >= self.limit:
            raise KeyError("power cut")
        self.made.append((item.problem.problem_id, item.attempt))
        return trajectory_of(item)


def test_drawn_problems_do_not_depend_on_their_order() -> None:
    forwards = draw_problems(PROBLEMS, count=3, seed=1)
    assert forwards == draw_problems(PROBLEMS[::-1], count=3, seed=1)
    assert forwards != draw_problems(PROBLEMS, count=3, seed=2)


def test_seed_of_an_attempt_does_not_depend_on_the_other_problems() -> None:
    all_of_them = plan_attempts(PROBLEMS, attempts_per_problem=2, seed=5)
    last = plan_attempts(PROBLEMS[-1:], attempts_per_problem=2, seed=5)
    assert all_of_them[-2:] == last
    assert len({item.seed for item in all_of_them}) == len(all_of_them)


def test_a_split_without_problems_is_named(tmp_path: Path) -> None:
    (tmp_path / PROBLEMS_FILE).write_text(PROBLEMS[0].model_dump_json())
    other = next(split for split in Split if split is not PROBLEMS[0].split)
    request = EvaluationRequest(
        checkpoint_directory="", checkpoint_name="c", problems_directory=str(tmp_path), split=other
    )
    with pytest.raises(ProblemError, match=f"holds 0 problems of split {other}, wanted at least 1"):
        main(request, Workspace.open(tmp_path / "run", Settings(home=tmp_path)))


def test_shards_cover_every_attempt_once_and_keep_problems_whole() -> None:
    plan = plan_attempts(PROBLEMS[:5], attempts_per_problem=3, seed=0)
    shards = [shard_of(plan, index=index, count=2) for index in range(2)]
    assert sorted(plan, key=repr) == sorted([*shards[0], *shards[1]], key=repr)
    names = [{item.problem.problem_id for item in shard} for shard in shards]
    assert not names[0] & names[1]


@pytest.mark.asyncio
async def test_evaluation_that_was_cut_off_makes_only_the_missing_attempts(
    tmp_path: Path,
) -> None:
    plan = plan_attempts(PROBLEMS, attempts_per_problem=2, seed=0)
    path = tmp_path / "rows.jsonl"
    first, second = Attempts(limit=5), Attempts()
    with pytest.raises(KeyError, match="power cut"):
        await run_attempts(plan, first, rows_path=path, concurrent_attempts=2)
    with path.open("ab") as file:
        file.write(b'{"step": 5, "problem_id": "p4", "att')
    rows = await run_attempts(plan, second, rows_path=path, concurrent_attempts=2)
    assert not set(first.made) & set(second.made)
    assert {(row.problem_id, row.attempt) for row in rows} == {
        (item.problem.problem_id, item.attempt) for item in plan
    }
    assert read_rows(path) == rows
    kept = read_trajectories(path.with_name(TRAJECTORIES_FILE))
    assert {(row["problem_id"], row["attempt"]) for row in kept} == {
        (row.problem_id, row.attempt) for row in rows
    }
    assert all(row["transcript"]["turns"][0]["text"] == "Fixed." for row in kept)


@pytest.mark.asyncio
async def test_infrastructure_failure_is_tried_again_and_never_scored(
    tmp_path: Path,
) -> None:
    async def attempt(item: AttemptRequest) -> Trajectory:
        return trajectory_of(item, Outcome.ENGINE_FAILED if item.retry == 0 else Outcome.FINISHED)

    plan = plan_attempts(PROBLEMS[:1], attempts_per_problem=2, seed=0)
    rows = await run_attempts(
        plan, attempt, rows_path=tmp_path / "rows.jsonl", concurrent_attempts=1
    )
    assert sorted(row.solved for row in rows) == [False, True]


@pytest.mark.asyncio
async def test_infrastructure_that_stays_broken_is_an_error(tmp_path: Path) -> None:
    async def attempt(item: AttemptRequest) -> Trajectory:
        return trajectory_of(item, Outcome.SANDBOX_FAILED)

    plan = plan_attempts(PROBLEMS[:1], attempts_per_problem=1, seed=0)
    with pytest.raises(GradingError, match="ended as sandbox_failed 3 times"):
        await run_attempts(plan, attempt, rows_path=tmp_path / "rows.jsonl", concurrent_attempts=1)


@pytest.mark.asyncio
async def test_an_engine_that_is_still_there_after_the_last_try_leaves_a_failed_attempt(
    tmp_path: Path,
) -> None:
    async def attempt(item: AttemptRequest) -> Trajectory:
        is_bad = item.problem is PROBLEMS[0]
        return trajectory_of(item, Outcome.ENGINE_FAILED if is_bad else Outcome.FINISHED)

    async def is_there() -> None:
        return None

    async def is_gone() -> None:
        raise ConfigError("nobody answers")

    plan = plan_attempts(PROBLEMS[:2], attempts_per_problem=1, seed=0)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match="nobody answers"):
        await run_attempts(
            plan, attempt, rows_path=path, concurrent_attempts=1, check_engine=is_gone
        )
    rows = await run_attempts(
        plan, attempt, rows_path=path, concurrent_attempts=1, check_engine=is_there
    )
    assert {row.problem_id for row in rows if not row.solved} >= {PROBLEMS[0].problem_id}
    assert len(rows) == len(plan)
    kept = read_trajectories(path.with_name(TRAJECTORIES_FILE))
    assert kept[0]["outcome"] == Outcome.ENGINE_FAILED

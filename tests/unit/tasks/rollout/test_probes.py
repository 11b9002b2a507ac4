"""Problems that RL begins with after probes: not the solved ones, all mixed ones, a share of the unsolved ones."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.evaluation.attempts import plan_attempts, run_attempts
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.records import Problem, Scorecard, Trajectory
from ostinato.tasks.rollout.config import PROBES_FILE, CurriculumConfig, RolloutConfig
from ostinato.tasks.rollout.probes import choose_probed, open_curriculum
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory

ATTEMPTS = 4
# problem pN has N % 5 solved attempts
PROBLEMS = [make_problem(f"p{index:02}") for index in range(40)]


def solved_attempts(problem_id: str) -> int:
    return int(problem_id[1:]) % (ATTEMPTS + 1)


def probes_of(problems: Sequence[Problem]) -> Scorecard:
    rows = [
        AttemptRow(
            problem_id=problem.problem_id,
            attempt=attempt,
            solved=attempt < solved_attempts(problem.problem_id),
            generated_tokens=60,
            turns=1,
            tool_calls=1,
            broken_calls=0,
        )
        for problem in problems
        for attempt in range(ATTEMPTS)
    ]
    return scorecard_from(rows, suite="probes", checkpoint="reinforced/mine@1", temperature=1.0)


def choose(share: float, seed: int = 0, problems: Sequence[Problem] = PROBLEMS) -> list[Problem]:
    return choose_probed(problems, probes_of(PROBLEMS), unsolved_share=share, seed=seed)


@pytest.mark.parametrize(("share", "unsolved"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_solved_problems_go_mixed_ones_stay_and_a_share_of_the_unsolved_stays(
    share: float, unsolved: int
) -> None:
    kept = choose(share)
    solved = [solved_attempts(problem.problem_id) for problem in kept]
    assert [solved.count(number) for number in range(5)] == [unsolved, 8, 8, 8, 0]
    assert [problem.solve_rate for problem in kept] == [number / ATTEMPTS for number in solved]
    plain = [problem.model_copy(update={"solve_rate": None}) for problem in kept]
    assert [problem for problem in PROBLEMS if problem in plain] == plain  # else as they were


def test_kept_unsolved_problems_depend_on_the_seed_alone_and_a_larger_share_holds_them() -> None:
    names = [{problem.problem_id for problem in choose(share)} for share in (0.25, 0.5, 1.0)]
    assert names[0] < names[1] < names[2]
    backwards = choose(0.25, problems=PROBLEMS[::-1])
    assert {problem.problem_id for problem in backwards} == names[0]
    assert any({one.problem_id for one in choose(0.25, seed)} != names[0] for seed in (1, 2, 3))


def test_problem_without_probes_is_kept_without_a_rate() -> None:
    new = make_problem("new")
    assert choose(0.0, problems=[*PROBLEMS, new])[-1] == new


def test_probes_that_leave_no_problem_are_named() -> None:
    ends = [problem for problem in PROBLEMS if solved_attempts(problem.problem_id) in (0, ATTEMPTS)]
    with pytest.raises(
        ProblemError,
        match=r"probes of reinforced/mine@1 leave 0 of 16 problems: every attempt solved 8, and none solved 8, .*"
        r"unsolved_share=0 keeps none; wanted at least 1",
    ):
        choose(0.0, problems=ends)


def test_curriculum_draws_what_is_kept_and_begins_with_the_counts(tmp_path: Path) -> None:
    (tmp_path / PROBES_FILE).write_text(probes_of(PROBLEMS).model_dump_json())
    config = RolloutConfig(curriculum=CurriculumConfig(probes="start", unsolved_share=0.5))
    curriculum = open_curriculum(PROBLEMS, config, str(tmp_path))
    drawn = []
    while not curriculum.is_exhausted:
        drawn.append(curriculum.draw(()))
    assert sorted(drawn, key=lambda one: one.problem_id) == choose(0.5)
    unsolved = next(one.problem_id for one in drawn if one.solve_rate == 0)
    half = next(one.problem_id for one in drawn if one.solve_rate == 0.5)
    assert curriculum.weight(half) > 1.5 * curriculum.weight(unsolved)
    without = open_curriculum(PROBLEMS, config, None)
    assert len({without.weight(problem.problem_id) for problem in PROBLEMS}) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", [1, 7, 19])
async def test_probes_that_were_cut_off_equal_probes_in_one_go(tmp_path: Path, limit: int) -> None:
    made = 0

    async def attempt(item: AttemptRequest) -> Trajectory:
        nonlocal made
        if made == limit:
            raise KeyError("power cut")
        made += 1
        return make_trajectory(item, solved=item.attempt < solved_attempts(item.problem.problem_id))

    async def score(folder: Path) -> Scorecard:
        plan = plan_attempts(PROBLEMS[:5], attempts_per_problem=ATTEMPTS, seed=0)
        rows = await run_attempts(
            plan, attempt, rows_path=folder / "rows.jsonl", concurrent_attempts=2
        )
        return scorecard_from(rows, suite="probes", checkpoint="c", temperature=1.0)

    with pytest.raises(KeyError, match="power cut"):
        await score(tmp_path)
    made, limit = limit, 1000
    resumed = await score(tmp_path)
    assert made == 5 * ATTEMPTS
    one_go = tmp_path / "one"
    one_go.mkdir()
    assert resumed == await score(one_go)
    assert [score.solved for score in resumed.problems] == [0, 1, 2, 3, 4]

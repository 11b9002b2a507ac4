"""Numbers of a step."""

import pytest

from ostinato.infra.agent.transcript import CallStatus, ToolCallRecord, TurnRecord
from ostinato.tasks.records import Group, Trajectory
from ostinato.tasks.reinforcement.step_metrics import ENGINE_TOTALS, EngineTotals, describe_groups
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory


def group(name: str, solved: tuple[bool, ...]) -> Group:
    members = tuple(
        make_trajectory(
            AttemptRequest(f"{name}.t{index}", name, make_problem(name), index, 0, 1),
            solved=good,
            versions=(0,) * (index + 1),
        )
        for index, good in enumerate(solved)
    )
    return Group(group_id=name, problem_id=name, trajectories=members)


def test_rates_are_over_trajectories_and_over_problems() -> None:
    numbers = describe_groups([group("a", (True, False)), group("b", (False, False))])
    assert numbers["solve_rate"] == pytest.approx(0.25)
    assert numbers["problems_solved_ratio"] == pytest.approx(0.5)
    assert numbers["generated_tokens_mean"] == pytest.approx(1.5)
    assert numbers["broken_call_ratio"] == 0.0


def attempt_that(*calls: str) -> Trajectory:
    """An attempt with one turn per call; a call is a tool's name, or a command line."""
    turns = tuple(
        TurnRecord(
            generated_tokens=1,
            text="",
            calls=(
                ToolCallRecord(
                    tool="run_terminal" if " " in call or call == "pytest" else call,
                    arguments={"command": call},
                    status=CallStatus.OK,
                    wall_seconds=0.0,
                ),
            ),
        )
        for call in calls
    )
    [plain] = group("a", (True,)).trajectories
    transcript = plain.transcript.model_copy(update={"turns": turns})
    return plain.model_copy(update={"transcript": transcript})


def habits_of(*attempts: Trajectory) -> dict[str, float]:
    numbers = describe_groups([Group(group_id="a", problem_id="a", trajectories=attempts)])
    wanted = ("looks_before_edits_ratio", "tests_after_edits_ratio", "edits_mean")
    return {name: numbers[name] for name in wanted if name in numbers}


def test_habits_are_of_the_attempts_that_edit() -> None:
    careful = attempt_that("read_file", "edit_file", "edit_file", "pytest -q")
    hasty = attempt_that("edit_file", "read_file", "ls -l")
    early = attempt_that("pytest", "grep", "write_file")
    idle = attempt_that("read_file", "pytest")
    assert habits_of(careful, hasty, early, idle) == {
        "looks_before_edits_ratio": pytest.approx(2 / 3),
        "tests_after_edits_ratio": pytest.approx(1 / 3),
        "edits_mean": 1.0,
    }
    assert habits_of(idle) == {"edits_mean": 0.0}
    assert describe_groups([group("a", (True,))])["calls_per_turn_mean"] == 0.0


def test_engine_totals_are_told_as_differences() -> None:
    totals = EngineTotals()
    first = {
        "steps": 10.0,
        "busy_seconds": 1.0,
        "generated_tokens": 50.0,
        "occupied_slot_steps": 80.0,
    }
    totals.update({"a": first, "b": {}})
    assert totals.since_last_step()["engine_batch_mean"] == pytest.approx(8.0)
    totals.update({"a": {**first, "busy_seconds": 3.0, "generated_tokens": 450.0}, "b": {}})
    assert totals.since_last_step()["engine_tokens_per_busy_second"] == pytest.approx(200.0)


def test_work_of_a_replica_that_was_restarted_is_never_negative() -> None:
    totals = EngineTotals()
    before = dict.fromkeys(ENGINE_TOTALS, 100.0)
    totals.update({"a": before, "b": before})
    totals.since_last_step()
    totals.update({"a": {**before, "generated_tokens": 130.0}, "b": {"generated_tokens": 5.0}})
    found = totals.since_last_step()
    assert found["engine_generated_tokens"] == 35.0
    assert min(found.values()) >= 0.0


def test_reward_terms_are_means_over_all_trajectories() -> None:
    numbers = describe_groups([group("a", (True, False)), group("b", (False, False))])
    assert numbers["reward_solved_mean"] == pytest.approx(0.25)

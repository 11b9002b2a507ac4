"""Numbers of a step."""

import pytest

from ostinato.tasks.records import Group
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

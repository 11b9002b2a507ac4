"""The queue of ablations: its arms are recipes, its rows stay readable, its times are those of a reward."""

import json

import pytest

from ostinato.flows.recipe import load_recipe
from tests.benchmarks import ablations


@pytest.mark.parametrize("name", ablations.Plan.read().arms)
def test_every_arm_is_a_recipe_that_differs_from_its_baseline(name: str) -> None:
    plan = ablations.Plan.read()
    arm = plan.arms[name]
    made = load_recipe(arm.recipe, overrides=[*plan.every_arm, *arm.set])
    assert arm.baseline in plan.arms
    if name != arm.baseline:
        other = plan.arms[arm.baseline]
        assert made != load_recipe(other.recipe, overrides=[*plan.every_arm, *other.set])


def test_kl_is_ablated_in_the_reward_in_the_loss_and_away() -> None:
    plan = ablations.Plan.read()
    kinds = {
        (objective.kl_coefficient > 0, objective.kl_estimator)
        for arm in plan.arms.values()
        for objective in [load_recipe(arm.recipe, overrides=list(arm.set)).learning.objective]
    }
    assert kinds == {(False, "k1_in_reward"), (True, "k1_in_reward"), (True, "k3_in_loss")}


def test_seconds_to_a_reward_are_those_of_the_first_five_steps_that_have_it() -> None:
    baseline = [(10.0 * step, 0.2 if step <= 5 else 0.6) for step in range(1, 16)]
    wanted = ablations.half_of_rise(baseline)
    assert wanted == pytest.approx(0.4)
    assert ablations.seconds_to(baseline, wanted) == 80.0  # 0.2, 0.2, 0.6, 0.6, 0.6
    assert ablations.seconds_to([(3 * at, reward) for at, reward in baseline], wanted) == 240.0
    assert ablations.seconds_to([(at, 0.3) for at, _ in baseline], wanted) is None


def test_rows_from_before_there_was_a_time_are_read_and_said_to_lack_it() -> None:
    known = ablations.read_rows()
    older = ablations.ROWS.read_text().splitlines()[0]
    assert "seconds_to_reward" not in json.loads(older)
    row = ablations.Row.model_validate_json(older)
    page = ablations.write_page(ablations.Plan.read(), {("baseline", 0): row})
    assert "time to a reward not measured" in page
    assert "seed 0 not measured" in page
    both = {
        (name, 0): row.model_copy(update={"wanted_reward": 0.4, "seconds_to_reward": seconds})
        for name, seconds in (("baseline", 100.0), ("synchronous", 150.0))
    }
    assert "seed 0 1.50x" in ablations.write_page(ablations.Plan.read(), both)
    assert ablations.PAGE.read_text() == ablations.write_page(ablations.Plan.read(), known)


def test_routes_are_ablated_where_they_differ_with_the_mismatch_beside() -> None:
    plan = ablations.Plan.read()
    replayed, own = (
        load_recipe("nano", overrides=list(plan.arms[name].set)).learning
        for name in ("bf16_routes_replayed", "bf16_routes_not_replayed")
    )
    assert replayed.precision == own.precision == "bf16"
    assert (replayed.router_replay.enabled, own.router_replay.enabled) == (True, False)
    assert replayed.router_replay.compared_tokens > 0

    steps = [
        {"parity_one_cache_k3_nats": 1e-5, "mismatch_without_replay_k3_nats": 3e-4},
        {"parity_one_cache_k3_nats": 3e-5},  # nothing of its own version: not measured
    ]
    found = ablations.mean_mismatch(steps)
    assert found == pytest.approx({"equal weights": 2e-5, "own routes": 3e-4})
    row = ablations.Row.model_validate_json(ablations.ROWS.read_text().splitlines()[0])
    page = ablations.write_page(
        plan, {("deviation", 0): row.model_copy(update={"mismatch_k3": found})}
    )
    assert "| `deviation` | 0 | 2.0e-05 | not measured | 3.0e-04 |" in page
    assert "k3 in nats" not in ablations.write_page(plan, {("deviation", 0): row})


def test_the_mean_of_equal_seeds_is_theirs_in_a_narrower_interval() -> None:
    one = ablations.Metric(mean=0.04, low=0.01, high=0.06, confidence=0.95, count=400)
    four = ablations.over_seeds([one] * 4)
    assert four.mean == pytest.approx(one.mean)
    assert (four.mean - four.low, four.high - four.mean) == pytest.approx((0.015, 0.01))
    assert ablations.over_seeds([one]).low == pytest.approx(one.low)

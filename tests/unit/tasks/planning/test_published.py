"""The plan beside published step times: the half that nothing was fitted to is predicted, and no copy of its formulas is
fitted in its place.
"""

import pytest

from ostinato.tasks.planning.inputs import chip_names, load_inputs
from tests.benchmarks.plan_fit import MOST, START, Fit, current, varied
from tests.benchmarks.plan_published import TARGET, errors, figures, is_fitted, read_points

POINTS, MODELS = read_points()
FIT = Fit()
PLAN = current(load_inputs("h100"))


def test_half_of_the_blind_points_are_predicted_within_20_percent() -> None:
    blind = figures(POINTS, errors(POINTS, MODELS))["blind"]

    assert blind["points"] == 41
    assert blind["median_error"] <= TARGET


@pytest.mark.parametrize("kind", ["training", "rl"])
def test_training_and_rl_are_each_predicted_within_20_percent(kind: str) -> None:
    chosen = [point for point in POINTS if ("seconds" in point) is (kind == "rl")]

    assert figures(chosen, errors(chosen, MODELS))["blind"]["median_error"] <= TARGET


def test_the_fit_predicts_with_the_plan_s_own_formulas_and_inputs() -> None:
    assert FIT.errors(POINTS, PLAN) == errors(POINTS, MODELS)
    for chip in chip_names():
        inputs = load_inputs(chip)
        assert current(inputs) == PLAN
        assert varied(inputs, PLAN) == inputs


@pytest.mark.parametrize("name", START, ids=lambda name: name[1])
def test_a_fitted_input_moved_by_a_fifth_predicts_the_fitted_half_worse(
    name: tuple[str, str],
) -> None:
    fitted = [point for point in POINTS if is_fitted(point)]
    for factor in (0.8, 1.25):
        moved = PLAN | {name: PLAN[name] * factor}
        if moved[name] > MOST.get(name, moved[name]):
            continue
        assert FIT.loss(fitted, moved) > FIT.loss(fitted, PLAN)

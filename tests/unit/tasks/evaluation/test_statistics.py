"""Laws of the statistics: unbiased, honest width, nested attempts."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.evaluation.statistics import (
    AttemptRow,
    cluster_bootstrap,
    mean_metric,
    paired_difference,
    pass_at_k,
    proportion_metric,
    scorecard_from,
    wilson_interval,
)


def row(problem: str, attempt: int, solved: bool, **changes: int) -> AttemptRow:
    numbers: dict[str, Any] = {
        "generated_tokens": 60,
        "turns": 3,
        "tool_calls": 4,
        "broken_calls": 0,
    } | changes
    return AttemptRow(problem_id=problem, attempt=attempt, solved=solved, **numbers)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_equals_the_mean_over_all_draws_of_k(
    attempts: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    draws = list(combinations(attempts, k))
    solved = sum(attempts)
    assert pass_at_k(len(attempts), solved, k) == pytest.approx(
        np.mean([any(draw) for draw in draws])
    )


def test_pass_at_k_refuses_more_draws_than_attempts() -> None:
    with pytest.raises(ValueError, match="k=3"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize("concentration", [0.5, 5.0])
def test_interval_of_a_solve_rate_covers_the_truth_about_as_often_as_it_says(
    concentration: float,
) -> None:
    rng = np.random.default_rng(7)
    truth, hits, repeats = 0.4, 0, 500
    for _ in range(repeats):
        chances_P = rng.beta(truth * concentration, (1 - truth) * concentration, size=60)
        metric = proportion_metric(rng.binomial(4, chances_P) / 4, attempts=4, confidence=0.90)
        hits += metric.low <= truth <= metric.high
    # binomial error of the measured coverage is 1.3 points
    assert 0.86 <= hits / repeats <= 0.95


def test_interval_has_width_when_nothing_was_solved() -> None:
    metric = proportion_metric([0.0] * 20, attempts=4)
    assert metric.low == 0.0
    assert 0.05 < metric.high < 0.2


def test_wilson_interval_matches_the_textbook() -> None:
    low, high = wilson_interval(0.1, 50, confidence=0.95)
    assert (low, high) == (pytest.approx(0.0435, abs=5e-4), pytest.approx(0.2136, abs=5e-4))


@given(st.lists(st.floats(0, 100), min_size=2, max_size=20))
def test_mean_lies_inside_its_interval(values: list[float]) -> None:
    metric = mean_metric(values)
    assert metric.low <= metric.mean <= metric.high


def test_interval_widens_when_clusters_disagree() -> None:
    values = [1.0] * 20 + [0.0] * 20
    apart = cluster_bootstrap(values, ["a"] * 20 + ["b"] * 20)
    mixed = cluster_bootstrap(values, [f"cluster-{index % 20}" for index in range(40)])
    assert apart.high - apart.low > 4 * (mixed.high - mixed.low)


def test_paired_difference_finds_a_shift_that_unpaired_noise_would_hide() -> None:
    rng = np.random.default_rng(3)
    first = {f"p{index}": float(value) for index, value in enumerate(rng.uniform(0, 0.9, 60))}
    second = {name: value + 0.05 + float(rng.normal(0, 0.02)) for name, value in first.items()}
    difference = paired_difference(first, second)
    assert 0.04 < difference.low < difference.mean < difference.high < 0.06
    assert difference.p_value < 0.01


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8
    )
)
def test_paired_difference_of_equals_is_zero(rates: dict[str, float]) -> None:
    difference = paired_difference(rates, rates, resamples=200)
    assert (difference.mean, difference.low, difference.high, difference.p_value) == (0, 0, 0, 1)


def test_paired_difference_needs_a_shared_problem() -> None:
    with pytest.raises(GradingError, match="no shared problem"):
        paired_difference({"a": 1.0}, {"b": 1.0})


def test_scorecard_counts_problems_not_attempts() -> None:
    rows = [row("a", attempt, attempt == 0) for attempt in range(4)]
    rows += [row("b", attempt, True, broken_calls=1) for attempt in range(4)]
    card = scorecard_from(rows, suite="held_out", checkpoint="nano@1", temperature=1.0)
    assert card.average.mean == pytest.approx((0.25 + 1) / 2)
    assert card.average.count == 2
    assert card.best_of.mean == 1.0
    assert card.broken_call_ratio == pytest.approx(4 / 32)
    assert [score.solved for score in card.problems] == [1, 4]


def test_scorecard_does_not_depend_on_the_order_of_attempts() -> None:
    rows = [
        row(problem, attempt, (attempt + len(problem)) % 2 == 0)
        for problem in ("a", "bb")
        for attempt in range(3)
    ]
    cards = [
        scorecard_from(order, suite="s", checkpoint="c", temperature=1.0)
        for order in (rows, list(reversed(rows)))
    ]
    assert cards[0] == cards[1]


def test_means_of_attempts_are_of_those_that_noted_them() -> None:
    rows = [
        row("a", 0, solved=True, seconds=1, changed_lines=1),
        row("a", 1, solved=False, seconds=3, changed_lines=5),
        row("b", 0, solved=False),
    ]
    card = scorecard_from(rows, suite="s", checkpoint="c", temperature=1.0)
    every, solved = card.attempt_means, card.solved_attempt_means
    assert every is not None
    assert solved is not None
    assert (every.attempts, every.seconds, every.changed_lines) == (3, 2.0, 3.0)
    assert (every.generated_tokens, every.tool_calls, every.prompt_tokens) == (60.0, 4.0, None)
    assert (solved.attempts, solved.seconds, solved.changed_lines) == (1, 1.0, 1.0)
    none = scorecard_from(rows[2:], suite="s", checkpoint="c", temperature=1.0)
    assert none.solved_attempt_means is None


def test_scorecard_refuses_the_same_attempt_twice() -> None:
    with pytest.raises(GradingError, match="repeat"):
        scorecard_from(
            [row("a", 0, True), row("a", 0, True)], suite="s", checkpoint="c", temperature=1.0
        )


def test_a_row_with_an_unknown_field_is_refused() -> None:
    known = row("p", 0, True).model_dump(mode="json")
    assert AttemptRow.model_validate(known) == row("p", 0, True)
    with pytest.raises(ValueError, match="clusters"):
        AttemptRow.model_validate(known | {"clusters": 1})

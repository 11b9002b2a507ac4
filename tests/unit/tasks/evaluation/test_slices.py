"""Scores of slices: pass^k is unbiased, slices are scored as suites of their own, and a gate may bound each of them."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.config import GateConfig, Prices
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.evaluation.statistics import (
    AttemptRow,
    all_of_k,
    paired_difference,
    paired_slices,
    scorecard_from,
    solve_rates,
)
from ostinato.tasks.records import AttemptMeans, Scorecard

PROBLEMS, ATTEMPTS = 40, 4
SLICES = {
    "bug": [f"p{number:02d}" for number in range(20)],
    "feature": [f"p{number:02d}" for number in range(20, PROBLEMS)],
    "long": [f"p{number:02d}" for number in range(10, 30)],
    "absent": ["q"],
}


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_all_of_k_equals_the_mean_over_all_draws_of_k(
    attempts: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    draws = list(combinations(attempts, k))
    found = all_of_k(len(attempts), sum(attempts), k)
    assert found == pytest.approx(np.mean([all(draw) for draw in draws]), abs=1e-12)


def test_all_of_k_refuses_more_draws_than_attempts() -> None:
    with pytest.raises(ValueError, match="k=3"):
        all_of_k(2, 1, 3)


def rows(bug: float, feature: float, seed: int = 0) -> list[AttemptRow]:
    rng = np.random.default_rng(seed)
    return [
        AttemptRow(
            problem_id=f"p{number:02d}",
            attempt=attempt,
            solved=bool(rng.random() < (bug if number < 20 else feature)),
            generated_tokens=number,
            turns=3,
            tool_calls=4,
            broken_calls=0,
            prompt_tokens=100,
            changed_lines=2,
            seconds=1.5,
        )
        for number in range(PROBLEMS)
        for attempt in range(ATTEMPTS)
    ]


def card(name: str, bug: float, feature: float, *, seed: int = 0) -> Scorecard:
    made = rows(bug, feature, seed)
    return scorecard_from(made, suite="tiny@1", checkpoint=name, temperature=1.0, slices=SLICES)


def test_a_slice_is_scored_as_a_suite_of_its_problems_alone() -> None:
    found = card("c", 0.7, 0.2)
    assert list(found.slices) == ["bug", "feature", "long"]
    assert found.all_of is not None
    assert found.all_of.mean <= found.average.mean <= found.best_of.mean
    for name, part in found.slices.items():
        own = [row for row in rows(0.7, 0.2) if row.problem_id in SLICES[name]]
        alone = scorecard_from(own, suite="s", checkpoint="c", temperature=1.0)
        assert (part.average, part.best_of, part.all_of) == (
            alone.average,
            alone.best_of,
            alone.all_of,
        )
        assert part.attempt_means == alone.attempt_means
        assert list(part.problem_ids) == SLICES[name]
        assert part.average.low <= part.average.mean <= part.average.high
    assert found.slices["bug"].attempt_means == AttemptMeans(
        attempts=80, seconds=1.5, generated_tokens=9.5, prompt_tokens=100, tool_calls=4, changed_lines=2,
        reference_lines=None, turns=3,
    )  # fmt: skip


def test_slices_of_two_checkpoints_are_paired_by_problem() -> None:
    first, second = card("old", 0.3, 0.8), card("new", 0.9, 0.2, seed=1)
    pairs = paired_slices(first, second)
    assert list(pairs) == ["bug", "feature", "long"]
    before, after = solve_rates(first), solve_rates(second)
    for name, paired in pairs.items():
        wanted = [after[one] - before[one] for one in SLICES[name]]
        assert paired.mean == pytest.approx(np.mean(wanted))
        assert paired.count == len(SLICES[name])
    assert pairs["bug"].low > 0 > pairs["feature"].high
    assert pairs["bug"] == paired_difference({one: before[one] for one in SLICES["bug"]}, after)


CONFIG = GateConfig(margin=0.3, resamples=500)


def with_margins(**margins: float) -> GateConfig:
    return CONFIG.model_copy(update={"slice_margins": margins})


def test_gate_refuses_a_loss_on_a_named_slice_that_the_whole_suite_hides() -> None:
    old, new = card("old", 0.5, 0.8), card("new", 0.95, 0.3, seed=1)
    assert gate_candidate(new, old, CONFIG).passed
    decision = gate_candidate(new, old, with_margins(feature=0.1, bug=0.1))
    assert [check.name for check in decision.checks if not check.passed] == ["slice_feature"]
    assert "refused: slice feature" in decision.reason
    assert "margin -10.0 points" in decision.reason
    assert gate_candidate(new, old, with_margins(bug=0.1)).passed


def test_gate_refuses_a_slice_with_too_few_problems() -> None:
    config = with_margins(bug=1.0).model_copy(update={"minimum_problems": 30})
    decision = gate_candidate(card("new", 0.9, 0.9), card("old", 0.1, 0.9), config)
    assert [check.name for check in decision.checks if not check.passed] == ["enough_problems_bug"]
    assert "slice bug: 20 problems compared, at least 30 wanted" in decision.reason


@pytest.mark.parametrize("champion", [None, card("old", 0.5, 0.5)])
def test_gate_that_names_a_slice_of_another_suite_is_an_error(champion: Scorecard | None) -> None:
    with pytest.raises(
        ConfigError, match=r"slice_margins names refactor, and suite tiny@1 has .*bug"
    ):
        gate_candidate(card("new", 0.5, 0.5), champion, with_margins(refactor=0.1))


def test_cost_is_that_of_prompt_and_generated_tokens_at_their_prices() -> None:
    means = card("c", 0.5, 0.5).slices["bug"].attempt_means
    assert means is not None
    prices = Prices(input_usd_per_million_tokens=2.0, output_usd_per_million_tokens=10.0)
    assert prices.cost_usd(means) == pytest.approx((100 * 2 + 9.5 * 10) / 1e6)
    assert prices.cost_usd(means.model_copy(update={"prompt_tokens": None})) is None

"""The gate: not worse passes, worse or unknown is refused, and it always says why."""

import numpy as np
import pytest

from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.evaluation.statistics import AttemptRow, scorecard_from
from ostinato.tasks.records import Scorecard

CONFIG = GateConfig(resamples=500)


def card(
    name: str, chances_P: np.ndarray, *, seed: int, suite: str = "held_out", broken: int = 0
) -> Scorecard:
    rng = np.random.default_rng(seed)
    rows = [
        AttemptRow(
            problem_id=f"p{problem:03d}",
            attempt=attempt,
            solved=bool(rng.random() < chance),
            generated_tokens=60,
            turns=3,
            tool_calls=4,
            broken_calls=broken,
        )
        for problem, chance in enumerate(chances_P)
        for attempt in range(4)
    ]
    return scorecard_from(rows, suite=suite, checkpoint=name, temperature=1.0)


CHANCES = np.linspace(0.1, 0.9, 60)


def test_clearly_better_candidate_passes() -> None:
    decision = gate_candidate(
        card("new", CHANCES + 0.1, seed=1), card("old", CHANCES - 0.1, seed=2), CONFIG
    )
    assert decision.passed
    assert decision.difference.low > 0
    assert decision.reason.startswith("passed: solve rate")


def test_same_scorecard_passes_since_it_is_not_worse() -> None:
    assert gate_candidate(card("new", CHANCES, seed=1), card("old", CHANCES, seed=1), CONFIG).passed


def test_worse_candidate_is_refused_with_numbers() -> None:
    decision = gate_candidate(
        card("new", CHANCES - 0.2, seed=1), card("old", CHANCES, seed=2), CONFIG
    )
    assert not decision.passed
    assert "refused: solve rate" in decision.reason
    assert "margin -5.0 points" in decision.reason


def test_too_few_problems_cannot_pass() -> None:
    few = np.full(4, 0.5)
    decision = gate_candidate(card("new", few, seed=1), card("old", few, seed=1), CONFIG)
    assert not decision.passed
    assert "4 problems compared, at least 10 wanted" in decision.reason


def test_more_broken_calls_are_refused_though_the_solve_rate_holds() -> None:
    decision = gate_candidate(
        card("new", CHANCES, seed=1, broken=2), card("old", CHANCES, seed=1), CONFIG
    )
    assert [check.name for check in decision.checks if not check.passed] == ["broken_calls"]


@pytest.mark.parametrize(("floor", "passed"), [(0.0, True), (0.9, False)])
def test_first_checkpoint_needs_only_the_floor(floor: float, passed: bool) -> None:
    decision = gate_candidate(
        card("new", CHANCES, seed=1), None, CONFIG.model_copy(update={"floor": floor})
    )
    assert decision.passed is passed
    assert decision.champion is None


def test_other_problems_or_suite_are_an_error_not_a_verdict() -> None:
    with pytest.raises(GradingError, match="1 problems are on one scorecard only"):
        gate_candidate(card("new", CHANCES[:-1], seed=1), card("old", CHANCES, seed=1), CONFIG)
    with pytest.raises(GradingError, match="suite other"):
        gate_candidate(
            card("new", CHANCES, seed=1, suite="other"), card("old", CHANCES, seed=1), CONFIG
        )


def test_small_losses_do_not_add_up() -> None:
    best, champion, candidate = (
        card(name, CHANCES - loss, seed=1)
        for name, loss in (("best", 0.0), ("champion", 0.05), ("new", 0.1))
    )
    config = CONFIG.model_copy(update={"margin": 0.1})
    assert gate_candidate(candidate, champion, config).passed
    decision = gate_candidate(candidate, champion, config, (best, champion))
    assert [check.name for check in decision.checks if not check.passed] == ["cumulative_loss"]
    assert "since best, best of the last 20 champions" in decision.reason


def test_gate_rarely_passes_a_candidate_worse_by_the_margin() -> None:
    """At a true loss of exactly the margin the one-sided error is (1 - confidence) / 2 = 5 %."""
    config = CONFIG.model_copy(update={"margin": 0.1, "resamples": 300})
    passed = sum(
        gate_candidate(
            card("new", CHANCES - 0.1, seed=2 * trial),
            card("old", CHANCES, seed=2 * trial + 1),
            config,
        ).passed
        for trial in range(60)
    )
    assert passed <= 8

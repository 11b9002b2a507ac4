"""Laws of simulated cycles, few of them: `python -m tests.benchmarks.cycles` has the error rates."""

import numpy as np
import pytest

from ostinato.tasks.realtime.config import CanaryConfig, GuardConfig
from ostinato.tasks.realtime.promotion.guard import Advice
from tests.benchmarks.cycle_lines import POINT, run_drift, run_poisoned
from tests.benchmarks.cycle_world import Traffic, draw_chances, moved
from tests.benchmarks.cycles import quick_recipe, run_canary, run_cycle

RECIPE = quick_recipe(resamples=200)
CANARY = CanaryConfig(share=0.5, guard=GuardConfig(looks=3))  # 160 sessions decide


def chance(number: int) -> np.random.Generator:
    return np.random.default_rng(number)


def test_a_checkpoint_differs_by_the_effect_that_was_asked_for() -> None:
    before_P = draw_chances(400, chance(0))
    assert moved(before_P, 2 * POINT, chance(1)).mean() - before_P.mean() == pytest.approx(0.02)


def test_same_seed_is_the_same_cycle_and_canary() -> None:
    assert run_cycle(RECIPE, CANARY, 0.0, chance(2)) == run_cycle(RECIPE, CANARY, 0.0, chance(2))
    traffic = Traffic(share_dealt=0.5)
    first, second = (run_canary(RECIPE, CANARY, traffic, chance(3)) for _ in range(2))
    assert first == second


def test_ten_points_worse_never_ends_as_champion() -> None:
    # the gate's chance of passing one is below 1 in 1,000
    assert not any(run_cycle(RECIPE, CANARY, -10 * POINT, chance(n)).promoted for n in range(5))


def test_alike_canaries_are_rarely_withdrawn() -> None:
    traffic = Traffic(share_dealt=0.5, long_share=0.1, long_requests=10)
    runs = [run_canary(RECIPE, CANARY, traffic, chance(n)) for n in range(12)]
    # three of twelve at 5 %: 2 in 100
    assert sum(run.advice is Advice.ROLL_BACK for run in runs) <= 3


def test_line_of_small_losses_stops_and_without_memory_falls() -> None:
    remembered, forgotten = (
        run_drift(RECIPE, -1 * POINT, 8, champions, chance(4)) for champions in (20, 1)
    )
    assert remembered.lowest > -6 * POINT  # the margin and a point of noise
    assert forgotten.lowest < remembered.lowest


def test_poisoned_line_ships_nothing_worse_than_the_margin() -> None:
    assert run_poisoned(RECIPE, 0.05, 6, CANARY, chance(5)).shipped_worse_than_margin == 0

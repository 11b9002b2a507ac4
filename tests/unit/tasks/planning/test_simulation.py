"""Simulated rollouts: equal loads give equal runs, every attempt counts once, replicas and the bound on staleness
decide how long the trainer waits.
"""

import pytest

from ostinato.tasks.planning.simulation import SimulatedLoad, SimulatedRun, Simulation
from ostinato.tasks.rollout.config import RolloutConfig, StalenessConfig

ATTEMPTS = (
    4 * 8
)  # of a step, which takes 60 s; an attempt 100 s on a replica: 53 slots keep it busy


def run(
    replicas: int, *, bound: int = 8, sigma: float = 0.0, seed: int = 0, interval: int = 1
) -> SimulatedRun:
    load = SimulatedLoad(
        rollout=RolloutConfig(
            group_size=4,
            groups_per_step=8,
            concurrent_trajectories=256,
            seed=seed,
            staleness=StalenessConfig(max_staleness_versions=bound, update_interval_steps=interval),
        ),
        replicas=replicas,
        replica_slots=4,
        generation_seconds=100.0,
        tool_seconds=10.0,
        step_seconds=60.0,
        publish_seconds=1.0,
        length_sigma=sigma,
    )
    return Simulation(load.with_bound(bound)).run()


def test_equal_loads_give_equal_runs_and_other_seeds_others() -> None:
    assert run(8, sigma=0.9) == run(8, sigma=0.9)
    assert run(8, sigma=0.9) != run(8, sigma=0.9, seed=1)


@pytest.mark.parametrize("sigma", [0.0, 0.9])
def test_every_attempt_finishes_once_or_is_cancelled_at_the_end(sigma: float) -> None:
    found = run(14, sigma=sigma)

    assert found.attempts == found.finished + found.cancelled
    assert found.finished >= 27 * ATTEMPTS


def test_enough_replicas_keep_the_trainer_busy_and_half_of_them_half_of_the_time() -> None:
    assert run(28).trainer_idle_ratio < 0.05
    assert run(7).trainer_idle_ratio == pytest.approx(1 - 28 / (ATTEMPTS * 100 / 60), abs=0.05)


def test_a_tail_of_lengths_idles_the_trainer_unless_the_bound_spans_it() -> None:
    narrow, wide = run(28, bound=2, sigma=0.9), run(28, bound=32, sigma=0.9)

    assert run(28, bound=2).trainer_idle_ratio < 0.1
    assert narrow.trainer_idle_ratio > 0.4
    assert wide.trainer_idle_ratio < 0.05
    assert narrow.staleness_mean <= 2 < wide.staleness_mean


def test_the_trainer_waits_at_each_update_of_the_engines_where_the_interval_uses_up_the_bound() -> (
    None
):
    assert run(28, bound=7).trainer_idle_ratio < 0.02
    assert run(28, bound=7, interval=8).trainer_idle_ratio > 0.05
    assert run(28, bound=15, interval=8).trainer_idle_ratio < 0.02

"""The simulated fleet: seeded, near its ideal, and nothing lost when replicas die."""

import dataclasses

import pytest

from ostinato.infra.serving.engine.router import RouterLimits
from ostinato.infra.serving.engine.simulation import (
    FleetReport,
    FleetSimulation,
    ReplicaModel,
    Workload,
)

SMALL = Workload(sessions_per_replica=16.0)
MODEL = ReplicaModel(slots=16, restart_seconds=5.0)


def simulate(seed: int = 0, **options) -> FleetReport:
    return FleetSimulation(4, MODEL, SMALL, seed=seed, **options).run(60.0, 120.0)


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(seed=3) == simulate(seed=3)
    assert simulate(seed=3) != simulate(seed=4)


def test_one_replica_reaches_its_ideal() -> None:
    report = FleetSimulation(1, MODEL, SMALL, seed=0).run(60.0, 120.0)
    assert report.ideal_ratio == pytest.approx(1.0, abs=0.02)
    assert (report.moved_ratio, report.refed_ratio) == (0.0, 0.0)


def test_sessions_move_only_over_the_margin() -> None:
    never = simulate(limits=RouterLimits(steal_margin_tokens=10**9))
    seldom = simulate(limits=RouterLimits(steal_margin_tokens=16_384))
    assert never.moved_ratio == never.refed_ratio == 0.0
    assert 0.0 < seldom.moved_ratio < 0.2


def test_lost_replicas_lose_no_session() -> None:
    report = simulate(losses_per_replica_second=1 / 60)
    assert report.failed_turns > 0
    quiet = simulate()
    assert 0.5 * quiet.turns < report.turns
    assert report.ideal_ratio < quiet.ideal_ratio


def test_a_bound_on_outstanding_tokens_lets_turns_wait_and_loses_none() -> None:
    limits = RouterLimits(max_outstanding_tokens=60_000)
    bounded = simulate(limits=limits)
    assert bounded.turns > 0
    wide = dataclasses.replace(limits, max_outstanding_tokens=10**9)
    assert bounded.tokens_per_second <= simulate(limits=wide).tokens_per_second

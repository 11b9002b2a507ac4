"""The simulator: the same for the same seed, nothing lost, nothing over its limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.infra.sandbox.fleet.placement import PlacementPolicy
from ostinato.infra.sandbox.simulator.measurements import SimulationFigures
from ostinato.infra.sandbox.simulator.report import table_lines, write_report
from ostinato.infra.sandbox.simulator.scenario import Habits, Scenario, StartCosts
from ostinato.infra.sandbox.simulator.simulation import FleetSimulation
from ostinato.infra.sandbox.simulator.standard import full_fleet, large_fleet, tight_fleet

ROOT = Path(__file__).resolve().parents[5]
COSTS = StartCosts(
    start_cpu_seconds=0.02, start_spread=0.4, clean_cpu_seconds=0.004, idle_memory_bytes=4 << 20
)
_PROGRAM = """
from tests.unit.infra.sandbox.simulator.test_simulation import COSTS, small
from ostinato.infra.sandbox.simulator.simulation import FleetSimulation
print(FleetSimulation(small(), 7).run().model_dump_json())
"""


def small() -> Scenario:
    """A fiftieth of the large fleet for 100 seconds, with shorter lives, and all that can go wrong."""
    scenario = large_fleet(COSTS, scale=0.02, length_seconds=100.0)
    workload = scenario.workload.model_copy(
        update={"lease_seconds": 15.0, "dead_holder_share": 0.05}
    )
    habits = Habits(median_life_seconds=25.0)
    return scenario.model_copy(update={"workload": workload, "habits": habits})


@pytest.fixture(scope="module")
def large() -> SimulationFigures:
    return FleetSimulation(small(), 7).run()


def test_same_seed_gives_the_same_figures_in_another_process(large):
    # another hash seed: the order of sets must not matter
    answer = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "12345", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert SimulationFigures.model_validate_json(answer.stdout) == large


def test_another_seed_gives_another_run(large):
    other = FleetSimulation(small(), 8).run()

    assert other.samples != large.samples


def test_every_request_is_accounted_for_and_no_limit_is_passed(large):
    assert large.unaccounted_requests == 0
    assert large.overcommitted_nodes == 0
    assert large.peak_alive > 300
    assert large.asked > large.peak_alive


def test_lost_nodes_move_their_leases_or_report_them(large):
    assert large.moved_leases > 0
    assert large.lost_leases > 0
    assert large.moved_leases > large.lost_leases  # nine of ten requests are movable


def test_forks_stay_at_home_unless_it_is_full(large):
    assert large.forks_at_home > large.forks_copied > 0


def test_dead_holders_are_reaped_and_nobody_else(large):
    assert 10 < large.reaped <= large.dead_holders


def test_full_fleet_serves_by_priority_and_refuses_the_rest():
    figures = FleetSimulation(full_fleet(COSTS), 3).run()

    waits = figures.waits
    assert waits["verifier"].p99_seconds < waits["evaluation"].p99_seconds
    assert waits["evaluation"].p99_seconds < waits["training"].p99_seconds
    assert set(figures.refused) == {"at_once", "no_capacity"}
    assert figures.overcommitted_nodes == 0


def test_live_pressure_prevents_what_promises_do_not_see():
    blind = PlacementPolicy(num_candidates=1, uses_observations=False)
    without = FleetSimulation(tight_fleet(COSTS, blind, "blind"), 0).run()
    seeing = FleetSimulation(tight_fleet(COSTS, PlacementPolicy(), "seeing"), 0).run()

    assert without.asked == seeing.asked  # the same is wanted of both
    assert without.memory_kills > 10
    assert seeing.memory_kills == 0
    assert seeing.worst_memory_ratio < 0.95 < without.worst_memory_ratio


def test_report_holds_exactly_the_figures(tmp_path, large):
    table, data, plot = write_report(tmp_path, [large], {"costs": "given by the test"})
    read = json.loads(data.read_text())["simulations"][0]

    assert SimulationFigures.model_validate(read) == large
    assert table_lines([large])[2:] == table.read_text().splitlines()[6:]
    assert f"| requests | {large.asked:,} |" in table.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_figures_follow_the_costs_they_are_given():
    slow = COSTS.model_copy(update={"start_cpu_seconds": 2.0})
    cheap = FleetSimulation(full_fleet(COSTS), 3).run()
    dear = FleetSimulation(full_fleet(slow), 3).run()

    assert dear.waits["verifier"].p50_seconds > cheap.waits["verifier"].p50_seconds + 1.5

"""Laws of the scheduler's parts: leases, warm pools, placement."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ostinato.infra.sandbox.fleet.leases import LeaseTable
from ostinato.infra.sandbox.fleet.placement import choose_start_node
from ostinato.infra.sandbox.fleet.records import FleetPolicy, NodeReport, Pressure, Resources
from ostinato.infra.sandbox.fleet.view import BoxPhase, BoxState, ClusterView
from ostinato.infra.sandbox.fleet.warm_pools import DemandMeter
from tests.unit.infra.sandbox.fleet.toy_fleet import GIB, LARGE, SMALL, ToyFleet, node_spec

quick = settings(max_examples=50, deadline=None)


@quick
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["grant", "renew", "release", "reap"]),
            st.integers(0, 5),
            st.floats(0, 3),
        ),
        max_size=80,
    )
)
def test_lease_ends_exactly_once_and_not_before_its_time(actions):
    table, now = LeaseTable(), 0.0
    expiry, lengths, ends, granted = {}, {}, [], 0
    for action, number, step in actions:
        now += step
        live = sorted(expiry)
        if action == "grant":
            granted += 1
            lengths[f"lease-{granted}"] = 1 + number
            expiry[f"lease-{granted}"] = now + 1 + number
            table.grant(f"lease-{granted}", 1 + number, now)
        elif action == "reap":
            reaped = table.reap(now)
            assert set(reaped) == {name for name, at in expiry.items() if at <= now}
            ends += reaped
            expiry = {name: at for name, at in expiry.items() if name not in reaped}
        elif live:
            name = live[number % len(live)]
            if action == "renew":
                is_live = table.renew(name, now)
                assert is_live == (expiry[name] > now)
                expiry[name] = now + lengths[name] if is_live else expiry[name]
            else:
                assert table.release(name)
                ends.append(name)
                del expiry[name]

    assert len(ends) == len(set(ends)) == granted - len(table)


def test_wanted_warm_boxes_follow_demand():
    meter = DemandMeter(half_life_seconds=5.0, now_seconds=0.0)
    for number in range(400):
        meter.count(number * 0.05)  # 20 a second for 20 seconds
    meter.note_start(0.04)

    assert meter.per_second(20.0) == pytest.approx(20.0, rel=0.1)
    assert meter.boxes_wanted(20.0) == 2  # what arrives in two starts of 40 ms
    assert meter.boxes_wanted(2000.0) == 0


def test_kept_warm_boxes_follow_demand_within_their_bounds():
    policy = FleetPolicy(demand_half_life_seconds=5.0)
    fleet = ToyFleet.of(1, policy, starts_per_second=100.0, start_burst=100)
    bounds = SMALL.warm_maximum, LARGE.warm_maximum
    for _ in range(50):
        requests = [fleet.ask("small"), fleet.ask("large")]
        fleet.tick()
        fleet.now += 0.5  # a start takes so long
        fleet.deliver()
        fleet.heartbeat()
        for request in requests:
            fleet.scheduler.release(request, fleet.now)
        fleet.tick()
        fleet.deliver()
    view = fleet.scheduler.view
    busy = tuple(len(view.warm(name)) for name in ("small", "large"))
    fleet.settle(300)
    idle = tuple(len(view.warm(name)) for name in ("small", "large"))

    assert 0 < busy[0] <= bounds[0]
    assert (busy[1], bounds[1], idle) == (0, 0, (0, 0))


def _view_of(*pressures: Pressure) -> ClusterView:
    view = ClusterView()
    for number, pressure in enumerate(pressures):
        view.join(node_spec(f"node-{number}", start_burst=100), 0.0)
        view.heard(NodeReport(node_id=f"node-{number}", pressure=pressure), 0.0)
    return view


def _used(memory_gib: float, **stalls: float) -> Pressure:
    used = Resources(cpus=0, memory_bytes=int(memory_gib * GIB), disk_bytes=0)
    return Pressure(used=used, **stalls)


def _choose(view: ClusterView) -> str | None:
    nodes = list(view.nodes.values())
    node = choose_start_node(nodes, SMALL, rng=random.Random(0), now_seconds=0.0)
    return None if node is None else node.spec.node_id


def test_placement_follows_pressure_where_promises_are_equal():
    view = _view_of(_used(6.0), _used(1.0), _used(5.0))

    assert _choose(view) == "node-1"


def test_node_that_stalls_for_memory_takes_nothing():
    view = _view_of(_used(1.0, memory_stall_ratio=0.5), _used(7.5))

    assert _choose(view) is None
    assert _choose(_view_of(Pressure(), Pressure())) is not None


def test_by_promises_alone_what_nodes_report_does_not_count():
    fleet = ToyFleet.of(1, FleetPolicy(uses_observations=False))
    fleet.heartbeat(_used(7.9, memory_stall_ratio=0.5))
    request = fleet.ask("small")
    fleet.tick()
    fleet.deliver()

    assert fleet.granted() == [request]


def test_boxes_no_report_can_have_shown_count_at_once():
    view = _view_of(_used(0.5), _used(1.0))
    for number in range(3):
        box = BoxState(f"box-{number}", view.nodes["node-0"], SMALL, BoxPhase.STARTING, 0.0)
        view.add(box)

    assert _choose(view) == "node-1"


def test_one_able_node_is_found_whatever_is_drawn():
    view = _view_of(*(_used(7.9) for _ in range(30)), _used(0.0))

    assert _choose(view) == "node-30"

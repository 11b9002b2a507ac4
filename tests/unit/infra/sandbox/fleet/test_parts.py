"""Laws of the scheduler's parts: leases, full queues, warm pools, placement."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ostinato.infra.platform.errors import CapacityExhausted
from ostinato.infra.sandbox.fleet.cluster_view import BoxPhase, BoxState, ClusterView
from ostinato.infra.sandbox.fleet.leases import LeaseTable
from ostinato.infra.sandbox.fleet.placement import PlacementPolicy, choose_start_node
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    NodeReport,
    Pressure,
    Priority,
    Resources,
)
from ostinato.infra.sandbox.fleet.scheduler import FleetScheduler
from ostinato.infra.sandbox.fleet.warm_pools import DemandMeter, warm_boxes_wanted
from tests.unit.infra.sandbox.fleet.toy_fleet import GIB, SMALL, node_spec

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
    expiry, ends, granted = {}, [], 0
    for action, number, step in actions:
        now += step
        live = sorted(expiry)
        if action == "grant":
            granted += 1
            expiry[f"lease-{granted}"] = now + 1 + number
            table.grant(f"lease-{granted}", "holder", 1 + number, now)
        elif action == "reap":
            reaped = [lease.lease_id for lease in table.reap(now)]
            assert set(reaped) == {name for name, at in expiry.items() if at <= now}
            ends += reaped
            expiry = {name: at for name, at in expiry.items() if name not in reaped}
        elif live:
            name = live[number % len(live)]
            if action == "renew":
                lease = table.renew(name, now)
                assert (lease is None) == (expiry[name] <= now)
                expiry[name] = expiry[name] if lease is None else lease.expires_at_seconds
            else:
                assert table.release(name) is not None
                ends.append(name)
                del expiry[name]

    assert len(ends) == len(set(ends)) == granted - len(table)


def test_full_queue_refuses_its_own_priority_only():
    policy = FleetPolicy(most_waiting=dict.fromkeys(Priority, 1))
    scheduler = FleetScheduler([SMALL], policy)

    def ask(name: str, priority: Priority) -> None:
        request = BoxRequest(request_id=name, template="small", holder_id="h", priority=priority)
        scheduler.ask(request, 0.0)

    ask("first", Priority.TRAINING)
    ask("urgent", Priority.VERIFIER)
    with pytest.raises(CapacityExhausted, match="1 requests of priority training wait"):
        ask("second", Priority.TRAINING)
    assert len(scheduler.queue) == 2


def test_warm_boxes_follow_demand_within_their_bounds():
    meter = DemandMeter(half_life_seconds=5.0, now_seconds=0.0)
    for number in range(400):
        meter.count(number * 0.05)  # 20 a second for 20 seconds
    meter.note_start(0.04)
    template = SMALL.model_copy(update={"warm_maximum": 100})
    few = template.model_copy(update={"warm_maximum": 1})

    assert meter.per_second(20.0) == pytest.approx(20.0, rel=0.1)
    assert warm_boxes_wanted(template, meter, 20.0) == 2  # what arrives in two starts of 40 ms
    assert warm_boxes_wanted(few, meter, 20.0) == 1
    assert warm_boxes_wanted(template, meter, 2000.0) == 0
    assert warm_boxes_wanted(SMALL.model_copy(update={"warm_maximum": 0}), None, 0.0) == 0


def _view_of(*pressures: Pressure) -> ClusterView:
    view = ClusterView()
    for number, pressure in enumerate(pressures):
        view.join(node_spec(f"node-{number}", start_burst=100), 0.0)
        view.heard(NodeReport(node_id=f"node-{number}", pressure=pressure), 0.0)
    return view


def _used(memory_gib: float, **stalls: float) -> Pressure:
    used = Resources(cpus=0, memory_bytes=int(memory_gib * GIB), disk_bytes=0)
    return Pressure(used=used, **stalls)


def _choose(view: ClusterView, policy: PlacementPolicy) -> str | None:
    node = choose_start_node(
        list(view.nodes.values()),
        SMALL,
        Priority.VERIFIER,
        policy,
        rng=random.Random(0),
        now_seconds=0.0,
    )
    return None if node is None else node.spec.node_id


def test_placement_follows_pressure_where_promises_are_equal():
    view = _view_of(_used(6.0), _used(1.0), _used(5.0))

    assert _choose(view, PlacementPolicy()) == "node-1"


def test_node_that_stalls_for_memory_takes_nothing():
    view = _view_of(_used(1.0, memory_stall_ratio=0.5), _used(7.5))

    assert _choose(view, PlacementPolicy()) is None
    assert _choose(view, PlacementPolicy(uses_observations=False)) is not None


def test_boxes_no_report_can_have_shown_count_at_once():
    view = _view_of(_used(0.5), _used(1.0))
    for number in range(3):
        box = BoxState(f"box-{number}", "node-0", SMALL, BoxPhase.STARTING, 0.0)
        view.add(box)

    assert _choose(view, PlacementPolicy()) == "node-1"


def test_one_able_node_is_found_whatever_is_drawn():
    view = _view_of(*(_used(7.9) for _ in range(30)), _used(0.0))

    assert _choose(view, PlacementPolicy(num_candidates=1)) == "node-30"

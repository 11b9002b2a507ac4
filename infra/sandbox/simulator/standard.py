"""The scenarios that the benchmark and the tests run.

`large_fleet` (100,000 boxes alive at scale 1, with a burst, lost nodes and forks), `tight_fleet`
(memory promised several times over, where placement matters) and `full_fleet` (more wanted than
there is).
"""

import math

from ostinato.infra.sandbox.fleet.placement import PlacementPolicy
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import NodeSpec, Priority, Resources, Template
from ostinato.infra.sandbox.simulator.scenario import (
    Burst,
    Habits,
    NodeLoss,
    Scenario,
    StartCosts,
    Workload,
)

_GIB = 1 << 30
_MIB = 1 << 20
_LARGE_NODES = 320
_LARGE_REQUESTS_PER_SECOND = 640.0  # some are lent a warm box, the others are starts
_LARGE_BURST = 10_000
_LARGE_LOST_NODES = 8


def box_template(name: str, *, warm_maximum: int = 0) -> Template:
    """A box of half a processor, 512 MiB of memory and 1 GiB of disk."""
    declared = Resources(cpus=0.5, memory_bytes=512 * _MIB, disk_bytes=_GIB)
    return Template(name=name, declared=declared, warm_maximum=warm_maximum)


def make_nodes(
    num_nodes: int, cpus: float, memory_bytes: int, *, memory_overcommit_ratio: float = 1.0
) -> tuple[NodeSpec, ...]:
    """Equal nodes."""
    capacity = Resources(cpus=cpus, memory_bytes=memory_bytes, disk_bytes=4096 * _GIB)
    return tuple(
        NodeSpec(
            node_id=f"node-{number}",
            capacity=capacity,
            memory_overcommit_ratio=memory_overcommit_ratio,
            # a start-up peak keeps about one core busy for ten seconds: spread them
            starts_per_second=cpus / 8,
            start_burst=max(1, int(cpus / 2)),
        )
        for number in range(num_nodes)
    )


def large_fleet(costs: StartCosts, scale: float = 1.0, length_seconds: float = 300.0) -> Scenario:
    """A steady stream, a burst at two thirds, lost nodes soon after, and forks throughout."""
    names = [f"repository-{number}" for number in range(16)]
    burst_at_seconds = length_seconds * 2 / 3
    return Scenario(
        name="large_fleet",
        nodes=make_nodes(max(4, math.ceil(_LARGE_NODES * scale)), 64, 256 * _GIB),
        templates=tuple(box_template(name, warm_maximum=math.ceil(64 * scale)) for name in names),
        workload=Workload(
            length_seconds=length_seconds,
            requests_per_second=_LARGE_REQUESTS_PER_SECOND * scale,
            template_shares={name: 1 / (rank + 1) for rank, name in enumerate(names)},
            bursts=(
                Burst(at_seconds=burst_at_seconds, num_requests=math.ceil(_LARGE_BURST * scale)),
            ),
            losses=(
                NodeLoss(
                    at_seconds=burst_at_seconds + 15.0,
                    num_nodes=max(1, round(_LARGE_LOST_NODES * scale)),
                    away_seconds=30.0,
                ),
            ),
            lease_seconds=120.0,
        ),
        costs=costs,
        policy=FleetPolicy(start_seconds=10.0),
    )


def tight_fleet(costs: StartCosts, placement: PlacementPolicy, name: str) -> Scenario:
    """Few nodes, large boxes, memory promised several times over, and bursts.

    What a box uses differs much from what it declares, so promises alone do not show which node is
    full.
    """
    declared = Resources(cpus=0.5, memory_bytes=4 * _GIB, disk_bytes=_GIB)
    return Scenario(
        name=name,
        nodes=make_nodes(32, 16, 64 * _GIB, memory_overcommit_ratio=3.0),
        templates=(Template(name="repository-0", declared=declared),),
        workload=Workload(
            length_seconds=240.0,
            requests_per_second=11.5,
            template_shares={"repository-0": 1.0},
            fork_share=0.0,
            lost_start_share=0.0,
            bursts=tuple(
                Burst(at_seconds=40.0 * number, num_requests=100) for number in range(1, 6)
            ),
        ),
        costs=costs,
        habits=Habits(
            median_life_seconds=60.0,
            life_spread=1.0,
            peak_memory_ratio=0.3,
            steady_memory_ratio=0.35,
        ),
        policy=FleetPolicy(placement=placement),
    )


def full_fleet(costs: StartCosts) -> Scenario:
    """Twice as much wanted as fits: who waits, and who is refused."""
    return Scenario(
        name="full_fleet",
        nodes=make_nodes(8, 16, 32 * _GIB),
        templates=(box_template("repository-0"),),
        workload=Workload(
            length_seconds=240.0,
            requests_per_second=16.0,
            priority_shares={
                Priority.TRAINING: 0.6,
                Priority.EVALUATION: 0.2,
                Priority.VERIFIER: 0.2,
            },
            template_shares={"repository-0": 1.0},
            wait_seconds=30.0,
        ),
        costs=costs,
        habits=Habits(median_life_seconds=60.0),
        policy=FleetPolicy(most_waiting=dict.fromkeys(Priority, 200)),
    )

"""The service with real boxes: leases are renewed, reaped, moved; states are forked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, SandboxLost
from ostinato.infra.sandbox.fleet.client import LeasedBox
from ostinato.infra.sandbox.fleet.node import NodeDaemon, RepositoryBoxes
from ostinato.infra.sandbox.fleet.pressure import read_pressure
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    FleetPolicy,
    NodeSpec,
    Resources,
    StopBox,
    Template,
)
from ostinato.infra.sandbox.fleet.service import FleetService

GIB = 1 << 30
WORDKIT = Template(
    name="wordkit",
    declared=Resources(cpus=0.5, memory_bytes=GIB // 2, disk_bytes=GIB // 4),
    warm_maximum=1,
)
PATIENT = FleetPolicy(
    # the machine's own use must not decide what a test sees
    uses_observations=False,
    node_silence_seconds=30.0,
    heartbeat_seconds=0.1,
)


class Fleet:
    """A service with daemons in this process."""

    def __init__(self, policy: FleetPolicy) -> None:
        self.service = FleetService([WORDKIT], policy)
        self.daemons: list[NodeDaemon] = []

    async def add(self, name: str, repository, memory_bytes: int = 2 * GIB) -> NodeDaemon:
        capacity = Resources(cpus=64, memory_bytes=memory_bytes, disk_bytes=1 << 50)
        spec = NodeSpec(node_id=name, capacity=capacity)
        boxes = RepositoryBoxes({"wordkit": repository})
        daemon = NodeDaemon(spec, boxes, lambda: read_pressure(Path("/tmp")))
        self.daemons.append(daemon)
        await self.service.add_node(spec, daemon)
        return daemon

    async def acquire(self, name: str, **changes: object) -> LeasedBox:
        """A box as a holder has it."""
        grant = await self.service.acquire(wanted(name, **changes))
        (node,) = [daemon for daemon in self.daemons if daemon.spec.node_id == grant.node_id]

        async def give_back(box: LeasedBox) -> None:
            self.service.release(box.request_id)

        return LeasedBox(grant, node, give_back)

    @property
    def num_boxes(self) -> int:
        return sum(daemon.num_boxes for daemon in self.daemons)


@pytest.fixture
async def make_fleet() -> AsyncIterator[Callable[[FleetPolicy], Fleet]]:
    fleets: list[Fleet] = []

    def make(policy: FleetPolicy = PATIENT) -> Fleet:
        fleets.append(Fleet(policy))
        return fleets[-1]

    yield make
    for fleet in fleets:
        await fleet.service.close()
        for daemon in fleet.daemons:
            await daemon.close()


def wanted(name: str, **changes: object) -> BoxRequest:
    fields = {"request_id": name, "template": "wordkit"}
    return BoxRequest.model_validate(fields | changes)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_granted_box_works_and_the_next_one_is_new(make_fleet, wordkit):
    fleet = make_fleet()
    await fleet.add("node", wordkit)
    await fleet.service.start()
    first = await fleet.acquire("first")
    result = await first.exec("echo dirt > dirt && echo ok", 120)
    dirt = await first.diff()
    await first.close()
    second = await fleet.acquire("second")

    assert (result.output, dirt) == (b"ok\n", {"dirt": b"dirt\n"})
    assert await second.diff() == {}
    assert second.sandbox_id != first.sandbox_id


async def test_silent_holder_loses_its_box_and_a_renewing_one_keeps_it(make_fleet, wordkit):
    fleet = make_fleet()
    await fleet.add("node", wordkit)
    await fleet.service.start()
    silent = await fleet.acquire("silent", lease_seconds=0.5)
    alive = await fleet.acquire("alive", lease_seconds=60.0)
    await until(lambda: fleet.num_boxes == 1)

    with pytest.raises(SandboxLost, match="is not on node"):
        await silent.list()
    assert silent.is_lost
    assert fleet.service.renew(["silent", "alive"]) == ["silent"]
    assert "counting.py" in await alive.list("wordkit")


async def test_full_fleet_refuses_after_the_wait_and_serves_after_a_release(make_fleet, wordkit):
    fleet = make_fleet(PATIENT)
    await fleet.add("node", wordkit, memory_bytes=GIB // 2 * 10 // 9 + 1)
    await fleet.service.start()
    await fleet.service.acquire(wanted("first"))
    with pytest.raises(CapacityExhausted, match="no room in time"):
        await fleet.service.acquire(wanted("second", wait_seconds=0.2))
    waiting = asyncio.create_task(fleet.service.acquire(wanted("third")))
    await asyncio.sleep(0)
    fleet.service.release("first")

    assert (await waiting).request_id == "third"


async def test_lost_box_ends_its_lease(make_fleet, wordkit):
    fleet = make_fleet()
    daemon = await fleet.add("node", wordkit)
    await fleet.service.start()
    lost = await fleet.acquire("lost")
    await fleet.acquire("kept")
    await daemon.obey(StopBox(box_id=lost.sandbox_id, node_id="node"))
    await until(lambda: "lost" not in fleet.service.scheduler.leases)

    assert fleet.service.renew(["lost", "kept"]) == ["lost"]
    anew = await fleet.acquire("lost")
    assert "counting.py" in await anew.list("wordkit")


async def test_silent_fleet_leaves_no_boxes_behind(make_fleet, wordkit):
    fleet = make_fleet()
    daemon = await fleet.add("node", wordkit)
    await fleet.service.start()
    await fleet.acquire("orphan")
    await fleet.service.close()
    fence = asyncio.create_task(daemon.fence(0.2))
    await until(lambda: fleet.num_boxes == 0)
    fence.cancel()

    assert (await daemon.report(0.0)).boxes == frozenset()

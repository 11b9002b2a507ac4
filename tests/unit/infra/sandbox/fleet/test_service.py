"""The service with real boxes: leases are renewed, reaped, moved; states are forked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, SandboxLost
from ostinato.infra.sandbox.fleet.boxes import RepositoryBoxes
from ostinato.infra.sandbox.fleet.node import NodeDaemon
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.pressure import read_pressure
from ostinato.infra.sandbox.fleet.records import (
    BoxRequest,
    NodeSpec,
    Resources,
    StopBox,
    StopReason,
    Template,
)
from ostinato.infra.sandbox.fleet.service import FleetService

GIB = 1 << 30
WORDKIT = Template(
    name="wordkit",
    declared=Resources(cpus=0.5, memory_bytes=GIB // 2, disk_bytes=GIB // 4),
    warm_maximum=1,
)
PATIENT = FleetPolicy(node_silence_seconds=30.0)


class Fleet:
    """A service with daemons in this process."""

    def __init__(self, policy: FleetPolicy) -> None:
        self.service = FleetService([WORDKIT], policy, heartbeat_seconds=0.1)
        self.daemons: list[NodeDaemon] = []

    async def add(self, name: str, repository, memory_bytes: int = 2 * GIB) -> NodeDaemon:
        capacity = Resources(cpus=64, memory_bytes=memory_bytes, disk_bytes=1 << 50)
        spec = NodeSpec(node_id=name, capacity=capacity)
        boxes = RepositoryBoxes({"wordkit": repository})
        # the machine's own use must not decide what a test sees
        daemon = NodeDaemon(spec, boxes, lambda: _calm(read_pressure(Path("/tmp"))))
        self.daemons.append(daemon)
        await self.service.add_node(spec, daemon)
        return daemon

    @property
    def num_boxes(self) -> int:
        return sum(daemon.num_boxes for daemon in self.daemons)


def _calm(pressure):
    nothing = Resources(cpus=0, memory_bytes=0, disk_bytes=0)
    return pressure.model_copy(update={"used": nothing, "memory_stall_ratio": 0.0})


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
    fields = {"request_id": name, "template": "wordkit", "holder_id": "test"}
    return BoxRequest.model_validate(fields | changes)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_granted_box_works_and_returns_clean(make_fleet, wordkit):
    fleet = make_fleet()
    await fleet.add("node", wordkit)
    await fleet.service.start()
    grant = await fleet.service.acquire(wanted("first"))
    result = await fleet.service.call("first", "exec", "echo dirt > dirt && echo ok", 20)
    again = await fleet.service.acquire(wanted("first"))
    fleet.service.release("first")
    await fleet.service.acquire(wanted("second"))
    diff = await fleet.service.call("second", "diff")

    assert (result.output, again, diff) == (b"ok\n", grant, {})


async def test_silent_holder_loses_its_box_and_a_renewing_one_keeps_it(make_fleet, wordkit):
    fleet = make_fleet()
    await fleet.add("node", wordkit)
    await fleet.service.start()
    await fleet.service.acquire(wanted("silent", lease_seconds=0.5))
    await fleet.service.acquire(wanted("alive", lease_seconds=60.0))
    await until(lambda: "silent" not in fleet.service.scheduler.leases)

    with pytest.raises(SandboxLost, match="not renewed"):
        await fleet.service.call("silent", "list")
    assert fleet.service.renew(["silent", "alive"]) == ["silent"]
    assert "counting.py" in await fleet.service.call("alive", "list", "wordkit")


async def test_full_fleet_refuses_after_the_wait_and_serves_after_a_release(make_fleet, wordkit):
    fleet = make_fleet(PATIENT)
    await fleet.add("node", wordkit, memory_bytes=GIB // 2 * 10 // 9 + 1)
    await fleet.service.start()
    await fleet.service.acquire(wanted("first"))
    with pytest.raises(CapacityExhausted, match="no_capacity"):
        await fleet.service.acquire(wanted("second", wait_seconds=0.2))
    waiting = asyncio.create_task(fleet.service.acquire(wanted("third")))
    await asyncio.sleep(0)
    fleet.service.release("first")

    assert (await waiting).request_id == "third"


async def test_lost_box_is_replaced_under_the_same_lease(make_fleet, wordkit):
    fleet = make_fleet()
    daemon = await fleet.add("node", wordkit)
    await fleet.service.start()
    first = await fleet.service.acquire(wanted("moved"))
    await daemon.obey(StopBox(box_id=first.box_id, node_id="node", reason=StopReason.STRAY))
    await until(lambda: fleet.service.scheduler.box_of("moved") is None)
    await until(lambda: fleet.service.scheduler.box_of("moved") is not None)
    second = fleet.service.where("moved")

    assert (second.num_moves, second.box_id != first.box_id) == (1, True)
    assert "counting.py" in await fleet.service.call("moved", "list", "wordkit")


async def test_fork_goes_on_from_the_saved_state_on_another_node(make_fleet, wordkit):
    fleet = make_fleet()
    half = GIB // 2 * 10 // 9 + 1  # room for one box
    await fleet.add("home", wordkit, memory_bytes=half)
    await fleet.service.start()
    await fleet.service.acquire(wanted("parent"))
    await fleet.service.call("parent", "write", "wordkit/new.py", b"x = 1\n")
    await fleet.service.save_state("parent", "saved")
    await fleet.add("away", wordkit, memory_bytes=half)
    fork = await fleet.service.acquire(wanted("child", fork_of="saved"))
    await fleet.service.call("child", "write", "wordkit/new.py", b"x = 2\n")

    assert fork.node_id == "away"
    assert await fleet.service.call("child", "diff") == {"wordkit/new.py": b"x = 2\n"}
    assert await fleet.service.call("parent", "read", "wordkit/new.py") == b"x = 1\n"


async def test_silent_fleet_leaves_no_boxes_behind(make_fleet, wordkit):
    fleet = make_fleet()
    daemon = await fleet.add("node", wordkit)
    await fleet.service.start()
    await fleet.service.acquire(wanted("orphan"))
    await fleet.service.close()
    fence = asyncio.create_task(daemon.fence(0.2))
    await until(lambda: fleet.num_boxes == 0)
    fence.cancel()

    assert (await daemon.report(0.0)).boxes == frozenset()

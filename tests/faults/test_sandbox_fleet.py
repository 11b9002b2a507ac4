"""A holder killed with -9 gives its boxes back; a node killed with -9 loses no lease."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, SandboxLost
from ostinato.infra.sandbox.fleet.actor import ask, start_fleet
from ostinato.infra.sandbox.fleet.boxes import RepositoryBoxes
from ostinato.infra.sandbox.fleet.client import FleetClient
from ostinato.infra.sandbox.fleet.placement import PlacementPolicy
from ostinato.infra.sandbox.fleet.policy import FleetPolicy
from ostinato.infra.sandbox.fleet.records import NodeSpec, Resources, Template
from tests.fakes.repositories import WORDKIT, open_repository

# Ray starts within 5 s on two idle cores; a busy machine needs more
pytest_plugins = ["tests.fakes.ray_here"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
TEMPLATE = Template(
    name="wordkit", declared=Resources(cpus=0.1, memory_bytes=GIB // 4, disk_bytes=GIB // 4)
)
POLICY = FleetPolicy(
    node_silence_seconds=4.0,
    start_seconds=60.0,
    # promises alone: what else runs on this machine must not decide
    placement=PlacementPolicy(uses_observations=False),
)


def _start(name: str, *node_ids: str):
    capacity = Resources(cpus=4, memory_bytes=4 * GIB, disk_bytes=64 * GIB)
    repositories = {"wordkit": open_repository(WORDKIT)}
    return start_fleet(
        name,
        [TEMPLATE],
        [NodeSpec(node_id=node_id, capacity=capacity) for node_id in node_ids],
        partial(RepositoryBoxes, repositories),
        writable=Path("/tmp"),
        policy=POLICY,
        heartbeat_seconds=0.5,
    )


async def _until(condition, seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.1)


def test_killed_holder_gives_its_boxes_back(ray_here):
    async def kill_and_wait() -> tuple[dict[str, int], dict[str, int]]:
        fleet = await _start("killed-holder", "only")
        program = [sys.executable, "-m", "tests.faults.holder_program"]
        holder = subprocess.Popen(
            [*program, ray_here, "killed-holder", "3"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        line = await asyncio.to_thread(holder.stdout.readline)
        held = await ask(fleet.count.remote(), "count")
        assert line.split() == ["held"] * 3
        holder.send_signal(signal.SIGKILL)
        holder.wait()

        async def is_empty() -> bool:
            return (await ask(fleet.count.remote(), "count"))["boxes"] == 0

        await _until(is_empty)
        return held, await ask(fleet.count.remote(), "count")

    held, left = asyncio.run(kill_and_wait())
    assert (held["leases"], held["boxes"]) == (3, 3)
    assert (left["leases"], left["boxes"], left["nodes"]) == (0, 0, 1)


def test_killed_node_moves_every_lease_or_reports_it_lost(ray_here):
    async def kill_and_wait() -> dict[str, str]:
        fleet = await _start("killed-node", "left", "right")
        client = FleetClient(fleet, "holder", lease_seconds=120.0)
        boxes = [await client.acquire("wordkit", is_movable=number % 2 == 0) for number in range(6)]
        homes = [await ask(fleet.where.remote(box.request_id), "where") for box in boxes]
        node_id, node = homes[0][0].node_id, homes[0][1]
        os.kill(await ask(node.process_id.remote(), "id"), signal.SIGKILL)

        async def works_again(box) -> bool:
            try:
                new_box = await client.again(box)
            except CapacityExhausted:  # another is starting
                return False
            try:
                return (await new_box.exec("echo works", 20)).output == b"works\n"
            except SandboxLost:  # the fleet has not seen yet that the node died
                return False

        async def is_reported_lost(box) -> bool:
            try:
                await client.again(box)
            except SandboxLost as error:
                return "its box was lost" in str(error)
            except CapacityExhausted:
                return False
            return False

        fates = {}
        for number, (box, (grant, _)) in enumerate(zip(boxes, homes, strict=True)):
            is_lost = grant.node_id == node_id and number % 2 == 1
            await _until(partial(is_reported_lost if is_lost else works_again, box))
            fates[box.request_id] = "reported lost" if is_lost else "works"
        await client.close()
        return fates

    fates = asyncio.run(kill_and_wait())
    assert len(fates) == 6
    assert next(iter(fates.values())) == "works"

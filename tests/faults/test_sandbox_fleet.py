"""A holder killed with -9 gives its boxes back; a node killed with -9 loses no lease."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.actors import find_actor
from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.fleet.actor import ask
from ostinato.infra.sandbox.fleet.client import FleetClient
from ostinato.infra.sandbox.fleet.node import RepositoryBoxes
from ostinato.infra.sandbox.fleet.records import FleetPolicy, NodeSpec, Resources, Template
from ostinato.infra.sandbox.fleet.repositories import RepositoryFleet
from tests.fakes.repositories import WORDKIT, open_repository

# Ray starts within 5 s on two idle cores; a busy machine needs more
pytest_plugins = ["tests.fakes.ray_here"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
TEMPLATE = Template(
    name="wordkit", declared=Resources(cpus=0.1, memory_bytes=GIB // 4, disk_bytes=GIB // 4)
)
POLICY = FleetPolicy(
    node_silence_seconds=10.0,
    start_seconds=60.0,
    heartbeat_seconds=0.5,
    uses_observations=False,  # what else runs on this machine must not decide
)


async def _start(name: str, *node_ids: str):
    capacity = Resources(cpus=4, memory_bytes=4 * GIB, disk_bytes=64 * GIB)
    make_boxes = partial(RepositoryBoxes, {"wordkit": open_repository(WORDKIT)})
    nodes = {NodeSpec(node_id=node_id, capacity=capacity): None for node_id in node_ids}
    fleet = await RepositoryFleet.start_on(
        nodes, name, [TEMPLATE], make_boxes, writable=Path("/tmp"), policy=POLICY
    )
    return fleet.actor


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


def test_killed_node_ends_its_leases_and_leaves_the_others(ray_here):
    async def kill_and_wait() -> tuple[list[bool], list[bool], int]:
        fleet = await _start("killed-node", "left", "right")
        client = FleetClient("killed-node", lease_seconds=60.0)
        boxes = [await client.acquire("wordkit") for _ in range(6)]
        is_doomed = [box.node_id == boxes[0].node_id for box in boxes]
        node = find_actor(f"killed-node-{boxes[0].node_id}")
        os.kill(await ask(node.__ray_call__.remote(lambda _: os.getpid()), "id"), signal.SIGKILL)

        async def has_ended() -> bool:
            return (await ask(fleet.count.remote(), "count"))["leases"] == is_doomed.count(False)

        await _until(has_ended)
        answered = []
        for box in boxes:
            try:
                answered.append((await box.exec("echo works", 120)).output == b"works\n")
            except SandboxLost:
                answered.append(False)
        again = await client.acquire("wordkit")
        assert (await again.exec("echo works", 120)).exit_code == 0
        await client.close()
        return is_doomed, answered, len({box.node_id for box in boxes})

    is_doomed, answered, num_nodes = asyncio.run(kill_and_wait())
    assert answered == [not doomed for doomed in is_doomed]
    assert num_nodes == 2

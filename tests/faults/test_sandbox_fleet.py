"""A holder killed with -9 gives its boxes back; a node killed with -9 loses no lease."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.actor import ActorHandle

from ostinato.infra.platform.cluster.actors import ask, find_actor, this_node
from ostinato.infra.platform.errors import ClusterError, SandboxLost
from ostinato.infra.sandbox.fleet.client import FleetClient, start_node
from ostinato.infra.sandbox.fleet.node import NodeLoad
from ostinato.infra.sandbox.protocol import SandboxKind, SandboxLimits
from tests.fakes.repositories import WORDKIT, open_repository

# Ray starts within 5 s on two idle cores; a busy machine needs more
pytest_plugins = ["tests.fakes.ray_here"]
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]


async def _start(
    name: str, num_nodes: int, kind: SandboxKind = SandboxKind.NAMESPACE
) -> list[ActorHandle]:
    repositories = [open_repository(WORDKIT)]
    is_machine = kind is SandboxKind.MICROVM
    limits = SandboxLimits(
        start_seconds=300.0 if is_machine else 60.0,
        **({"memory_bytes": 256 << 20, "writable_bytes": 32 << 20} if is_machine else {}),
    )
    nodes = [
        start_node(name, this_node(), index, repositories, limits, kind, max_boxes=16)
        for index in range(num_nodes)
    ]
    await asyncio.gather(*map(_load, nodes))
    return nodes


async def _load(node: ActorHandle) -> NodeLoad:
    return await ask(node.load.remote(), "load", 60.0)


async def _until(condition, seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.1)


@pytest.mark.slow
def test_killed_holder_gives_its_boxes_back(ray_here):
    async def kill_and_wait() -> int:
        (node,) = await _start("killed-holder", 1)
        program = [sys.executable, "-m", "tests.faults.holder_program"]
        holder = subprocess.Popen(
            [*program, ray_here, "killed-holder", "3"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        line = await asyncio.to_thread(holder.stdout.readline)
        held = (await _load(node)).leased
        assert line.split() == ["held"] * 3
        holder.send_signal(signal.SIGKILL)
        holder.wait()

        async def is_empty() -> bool:
            return (await _load(node)).leased == 0

        await _until(is_empty)
        return held

    assert asyncio.run(kill_and_wait()) == 3


@pytest.mark.parametrize(
    ("kind", "num_boxes"),
    [
        pytest.param(SandboxKind.NAMESPACE, 6, marks=pytest.mark.slow),
        pytest.param(SandboxKind.MICROVM, 2, marks=[pytest.mark.microvm, pytest.mark.nightly]),
    ],
)
def test_killed_node_ends_its_leases_and_leaves_the_others(ray_here, kind, num_boxes):
    name = f"killed-node-{kind.value}"

    async def kill_and_wait() -> tuple[list[bool], list[bool]]:
        nodes = await _start(name, 2, kind)  # they live as long as a handle
        client = FleetClient(name, lease_seconds=60.0)
        boxes = [await client.acquire("wordkit") for _ in range(num_boxes)]
        is_doomed = [box.node_name == boxes[0].node_name for box in boxes]
        node = find_actor(boxes[0].node_name)
        assert node is not None
        process = await ask(node.__ray_call__.remote(lambda _: os.getpid()), "id", 60.0)
        os.kill(process, signal.SIGKILL)
        answered = []
        for box in boxes:
            try:
                answered.append((await box.exec("echo works", 120)).output == b"works\n")
            except SandboxLost:
                answered.append(False)

        async def is_back() -> bool:
            try:
                return (await _load(node)).leased == 0
            except ClusterError:
                return False

        await _until(is_back)
        again = await client.acquire("wordkit")
        assert (await again.exec("echo works", 120)).exit_code == 0
        assert again.node_name == boxes[0].node_name  # the emptier one
        await client.close()
        assert len({box.node_name for box in boxes}) == len(nodes)
        return is_doomed, answered

    is_doomed, answered = asyncio.run(kill_and_wait())
    assert answered == [not doomed for doomed in is_doomed]

"""Laws of a node's leases, with real boxes."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.errors import (
    CapacityExhausted,
    OutOfMemory,
    SandboxError,
    SandboxHostLost,
    SandboxLost,
)
from ostinato.infra.sandbox.fleet.node import BoxNode, NodeLoad
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.snapshots import store
from ostinato.infra.sandbox.snapshots.layers import remove_folder

LONG = 300.0


@asynccontextmanager
async def open_node(repository: PreparedRepository, max_boxes: int) -> AsyncIterator[BoxNode]:
    node = BoxNode({"wordkit": repository}, SandboxLimits(start_seconds=120.0), max_boxes=max_boxes)
    try:
        yield node
    finally:
        await node.close()


async def run(node: BoxNode, name: str, command: bytes) -> None:
    limits = {"timeout_seconds": 60.0, "output_cap_bytes": 1000}
    await node.call(name, "request", "exec", 90.0, (command, b""), **limits)


async def held(node: BoxNode) -> tuple[int, int]:
    load = await node.load()
    return load.leased, load.waiting


async def until(node: BoxNode, wanted: tuple[int, int]) -> None:
    async with asyncio.timeout(120):
        while await held(node) != wanted:
            await asyncio.sleep(0.02)


@contextmanager
def is_lost() -> Iterator[None]:
    with pytest.raises(SandboxHostLost, match="is not leased here"):
        yield


async def test_a_box_works_and_the_next_one_is_new(wordkit):
    async with open_node(wordkit, 2) as node:
        await node.acquire("first", "wordkit", LONG, LONG)
        await run(node, "first", b"echo dirt > dirt")
        assert await node.call("first", "diff") == {"dirt": b"dirt\n"}
        await node.release("first")
        await node.release("first")
        await node.acquire("second", "wordkit", LONG, LONG)
        assert await node.call("second", "diff") == {}
        with is_lost():
            await node.call("first", "diff")
        with pytest.raises(SandboxError, match="wanted one of diff, request"):
            await node.call("second", "close")
        with pytest.raises(SandboxError, match="wanted one of: wordkit"):
            await node.acquire("third", "other", LONG, LONG)


async def test_a_silent_holder_loses_its_box_and_a_renewing_one_keeps_it(wordkit):
    async with open_node(wordkit, 2) as node:
        await node.acquire("alive", "wordkit", LONG, LONG)
        await node.acquire("silent", "wordkit", 0.5, LONG)
        await until(node, (1, 0))
        with is_lost():
            await node.call("silent", "diff")
        assert await node.renew(["silent", "alive"]) == ["silent"]
        assert await node.call("alive", "diff") == {}


async def test_leases_are_ended_after_one_whose_folder_could_not_be_removed(wordkit, monkeypatch):
    folders = []

    def fail_first(folder: Path) -> None:
        folders.append(folder)
        if len(folders) == 1:
            raise OSError("input/output error")
        remove_folder(folder)

    async with open_node(wordkit, 2) as node:
        await node.acquire("first", "wordkit", 0.5, LONG)
        await node.acquire("second", "wordkit", 1.5, LONG)
        monkeypatch.setattr(store, "remove_folder", fail_first)
        await until(node, (0, 0))
        assert folders


async def test_a_full_node_refuses_after_the_wait_and_serves_in_order_after_a_release(wordkit):
    served = []

    async def ask(node: BoxNode, name: str) -> None:
        await node.acquire(name, "wordkit", LONG, LONG)
        served.append(name)

    async with open_node(wordkit, 1) as node:
        await ask(node, "first")
        with pytest.raises(CapacityExhausted, match="all 1 are leased and 1 requests wait"):
            await node.acquire("impatient", "wordkit", LONG, 0.1)
        waiting = [asyncio.create_task(ask(node, name)) for name in ("second", "third", "fourth")]
        await until(node, (1, 3))
        await node.release("third")  # withdrawn while it waits
        with pytest.raises(SandboxLost, match="third was withdrawn"):
            await waiting[1]
        await node.release("first")
        await waiting[0]
        await node.release("second")
        await waiting[2]
        assert served == ["first", "second", "fourth"]


async def test_a_box_that_ruined_itself_between_two_requests_is_not_taken_for_a_lost_one(wordkit):
    fill = b"(sleep 0.3; while :; do n=$((n+1)); head -c 4000000 /dev/zero > fill$n; done) > /dev/null 2>&1 &"
    limits = SandboxLimits(start_seconds=120.0, writable_bytes=16 << 20)
    node = BoxNode({"wordkit": wordkit}, limits, max_boxes=1)
    try:
        await node.acquire("filler", "wordkit", LONG, LONG)
        await run(node, "filler", b"setsid sh -c '" + fill + b"'")
        await until(node, (0, 0))
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="wrote"):
                await run(node, "filler", b"true")
        await node.acquire("filler", "wordkit", LONG, LONG)
        assert await node.call("filler", "diff") == {}
    finally:
        await node.close()


async def test_a_lost_box_ends_its_lease_and_makes_room(wordkit):
    async with open_node(wordkit, 2) as node:
        await node.acquire("kept", "wordkit", LONG, LONG)
        before = set(psutil.Process().children(recursive=True))
        await node.acquire("lost", "wordkit", LONG, LONG)
        for process in set(psutil.Process().children(recursive=True)) - before:
            process.kill()
        with pytest.raises(SandboxLost):
            await run(node, "lost", b"true")
        await until(node, (1, 0))
        assert await node.renew(["lost", "kept"]) == []  # its holder is told why when it asks
        with pytest.raises(SandboxLost, match="ended with code"):
            await run(node, "lost", b"true")
        await node.acquire("lost", "wordkit", LONG, LONG)
        assert await node.call("lost", "diff") == {}


@pytest.mark.parametrize("seed", range(2))
async def test_any_mix_of_holders_stays_within_the_room_and_leaves_nothing(wordkit, seed):
    rng = random.Random(seed)
    most = 3
    lent: list[int] = []

    async def hold(node: BoxNode, name: str, kind: str, seconds: float) -> str:
        length = 0.3 if kind == "silent" else LONG
        asking = asyncio.create_task(node.acquire(name, "wordkit", length, LONG))
        if kind == "gives up":
            await asyncio.sleep(seconds)
            await node.release(name)
        try:
            await asking
        except SandboxLost:
            return "withdrawn"
        lent.append((await node.load()).leased)
        await asyncio.sleep(seconds)
        if kind != "silent":
            await node.release(name)
        return "served"

    kinds = [rng.choice(("gives back", "silent", "gives up")) for _ in range(16)]
    async with open_node(wordkit, most) as node:
        ends = await asyncio.gather(
            *(
                hold(node, f"holder{number}", kind, rng.random() / 10)
                for number, kind in enumerate(kinds)
            )
        )
        await until(node, (0, 0))
    assert len(ends) == len(kinds)
    assert max(lent) <= most
    for kind, end in zip(kinds, ends, strict=True):
        assert end == "served" or kind == "gives up"


def test_a_node_with_more_room_less_pressure_or_fewer_requests_is_better():
    some = NodeLoad(leased=4, waiting=1, max_boxes=10, pressure=0.5)
    larger, calmer = replace(some, max_boxes=20), replace(some, pressure=0.1)
    assert max(larger.score(0), calmer.score(0)) < some.score(0)
    assert some.score(0) < min(replace(some, waiting=3).score(0), some.score(1))

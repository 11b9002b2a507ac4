"""Laws of a fleet's client while nodes fail, without Ray."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.sandbox.fleet import client
from ostinato.infra.sandbox.fleet.client import FleetClient
from ostinato.infra.sandbox.fleet.node import NodeLoad


class FakeNode:
    """A node that lends anything. Its first renewal fails outside the node's own code."""

    def __init__(self) -> None:
        self.num_renewals = 0

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._answer(name))

    async def _answer(self, name: str) -> Any:
        if name == "load":
            return NodeLoad(leased=0, waiting=0, max_boxes=1, pressure=0.0)
        if name == "renew":
            self.num_renewals += 1
            if self.num_renewals == 1:
                raise RuntimeError("the connection is gone")
        return []


@pytest.fixture
def open_fleet(monkeypatch) -> Callable[..., FleetClient]:
    def open_client(nodes: dict[str, FakeNode], listed: list[str]) -> FleetClient:
        def find(name: str) -> FakeNode:
            if name not in nodes:
                raise ValueError(f"Failed to look up actor with name '{name}'")
            return nodes[name]

        worker = SimpleNamespace(get_worker_id=lambda: "holder")
        fake = SimpleNamespace(
            util=SimpleNamespace(list_named_actors=lambda: listed),
            get_actor=find,
            get_runtime_context=lambda: worker,
        )
        monkeypatch.setattr(client, "ray", fake)
        return FleetClient("fleet", lease_seconds=0.03)

    return open_client


async def test_a_node_that_ended_after_the_listing_is_passed_over(open_fleet):
    listed = ["fleet-machine0", "fleet-machine1"]
    fleet = open_fleet({"fleet-machine1": FakeNode()}, listed)
    assert (await fleet.acquire("wordkit")).node_name == "fleet-machine1"
    await fleet.close()
    fleet = open_fleet({}, listed)
    with pytest.raises(SandboxLost, match="none of 2 nodes reported its load: Failed to look up"):
        await fleet.acquire("wordkit")
    await fleet.close()


async def test_leases_are_renewed_after_a_renewal_that_failed_for_any_reason(open_fleet):
    node = FakeNode()
    fleet = open_fleet({"fleet-machine0": node}, ["fleet-machine0"])
    await fleet.acquire("wordkit")
    async with asyncio.timeout(10):
        while node.num_renewals < 2:
            await asyncio.sleep(0.01)
    await fleet.close()

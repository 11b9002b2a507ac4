"""Replicas as Ray actors behind one client: answers, updates, and the death of a process."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.infra.serving.engine.health import ReplicaState
from ostinato.infra.serving.engine.replica import start_replicas
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.decode.engine import EngineConfig
from tests.fakes.tiny_model import TINY, random_weights, tiny_request

pytest_plugins = ["tests.fakes.ray_here"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio, pytest.mark.usefixtures("ray_here")]


async def test_a_fleet_serves_updates_and_survives_a_killed_replica(tmp_path: Path) -> None:
    objects = ObjectStore.from_url(f"file://{tmp_path}/objects")
    publisher = ChainPublisher(objects, "chain")
    publisher.publish(0, random_weights(TINY))
    replicas = start_replicas(TINY, EngineConfig(slots=4), ["replica-0", "replica-1"], num_cpus=0.1)
    fleet = EngineFleet(replicas)
    assert await fleet.follow(objects, "chain") == [0, 0]
    first = [await fleet.generate(tiny_request(index)) for index in range(6)]
    assert all(len(generation.token_ids) == 10 for generation in first)
    statistics = await fleet.statistics()
    assert all(numbers["generated_tokens"] > 0 for numbers in statistics.values())

    publisher.publish(1, random_weights(TINY, seed=1))
    reports = await fleet.update_to(1)
    assert [report.version for report in reports] == [1, 1]

    health = await fleet.health()
    os.kill(int(health["replica-0"]["process_id"]), signal.SIGKILL)
    with pytest.raises(EngineError, match="replica-0 is gone"):
        await asyncio.gather(*(fleet.generate(tiny_request(index)) for index in range(20, 24)))
    for index in range(30, 34):
        assert set((await fleet.generate(tiny_request(index))).weight_versions_T.tolist()) == {1}
    await fleet.close()


@pytest.mark.nightly
async def test_a_killed_lone_replica_comes_back_at_the_newest_version(tmp_path: Path) -> None:
    objects = ObjectStore.from_url(f"file://{tmp_path}/objects")
    publisher = ChainPublisher(objects, "chain")
    publisher.publish(0, random_weights(TINY))
    replicas = start_replicas(
        TINY, EngineConfig(slots=4), ["lone"], num_cpus=0.1, chain=(objects, "chain")
    )
    fleet = EngineFleet(replicas)
    await fleet.generate(tiny_request(0))  # it applies version 0 by itself
    publisher.publish(1, random_weights(TINY, seed=1))
    process_id = (await fleet.health())["lone"]["process_id"]
    os.kill(int(process_id), signal.SIGKILL)
    with pytest.raises(EngineError, match="lone is gone"):
        await asyncio.gather(*(fleet.generate(tiny_request(index)) for index in range(1, 200)))
    generation = await fleet.generate(tiny_request(2))
    assert set(generation.weight_versions_T.tolist()) == {1}
    assert fleet.states() == {"lone": ReplicaState.SERVING}
    await fleet.close()

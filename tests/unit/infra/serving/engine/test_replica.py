"""A replica serves only verified weights. Here without Ray: the class is plain."""

import importlib.util
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError, EngineError, StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.health import ReplicaState
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.infra.serving.engine.start import start_engine
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation
from tests.fakes.tiny_model import TINY, random_weights

pytestmark = pytest.mark.asyncio
REQUEST = GenerateRequest("request", "session", (1, 2, 3), 8, (), seed=5)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/objects")


@pytest.fixture
def publisher(objects: ObjectStore) -> ChainPublisher:
    return ChainPublisher(objects, "chain")


def make_replica() -> EngineReplica:
    return EngineReplica("replica-0", TINY, EngineConfig(slots=4))


async def generate(replica: EngineReplica) -> Generation:
    return await replica.generate(REQUEST)


def damage(tmp_path: Path, version: int) -> None:
    for path in (tmp_path / "objects").rglob(f"*{version:08d}/*.zst"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(bytes(data))


async def test_a_new_replica_refuses_until_weights_are_verified(
    objects: ObjectStore, publisher: ChainPublisher
) -> None:
    replica = make_replica()
    with pytest.raises(EngineError, match="starting"):
        await generate(replica)
    assert await replica.follow(objects, "chain") is None
    with pytest.raises(EngineError, match="starting"):
        await generate(replica)
    publisher.publish(0, random_weights(TINY))
    await replica.update_to(0)
    assert len((await generate(replica)).token_ids) == 8


async def test_a_restarted_replica_starts_at_the_newest_version_not_at_the_first(
    objects: ObjectStore, publisher: ChainPublisher
) -> None:
    for version in range(3):
        publisher.publish(version, random_weights(TINY, seed=version))
    replica = make_replica()
    assert await replica.follow(objects, "chain") == 2
    assert (await generate(replica)).weight_versions_T.tolist() == [2] * 8


async def test_a_restarted_replica_is_updated_before_anybody_asks_it_to_recover(
    objects: ObjectStore, publisher: ChainPublisher
) -> None:
    """Who publishes may be the only one that talks to it: the others wait for the update."""
    publisher.publish(0, random_weights(TINY))
    publisher.publish(1, random_weights(TINY, seed=1))
    replica = EngineReplica("replica-0", TINY, EngineConfig(slots=4), (objects, "chain"))
    await replica.update_to(1)
    assert (await generate(replica)).weight_versions_T.tolist() == [1] * 8


async def test_a_failed_apply_raises_and_nothing_is_served_until_a_sound_one(
    objects: ObjectStore, publisher: ChainPublisher, tmp_path: Path
) -> None:
    publisher.publish(0, random_weights(TINY))
    replica = make_replica()
    await replica.follow(objects, "chain")
    publisher.publish(1, random_weights(TINY, seed=1))
    damage(tmp_path, 1)
    with pytest.raises(StorageError):
        await replica.update_to(1)
    assert (await replica.health())["state"] == ReplicaState.STALE
    with pytest.raises(EngineError, match="stale: update to version 1 failed"):
        await generate(replica)
    await replica.update_to(0)
    assert set((await generate(replica)).weight_versions_T.tolist()) == {0}


async def test_an_update_equals_an_engine_made_from_the_same_weights(
    objects: ObjectStore, publisher: ChainPublisher
) -> None:
    publisher.publish(0, random_weights(TINY))
    updated, fresh = make_replica(), make_replica()
    await updated.follow(objects, "chain")
    before = await generate(updated)
    await updated.end_session("session")
    publisher.publish(1, random_weights(TINY, seed=1))
    await updated.update_to(1)
    await fresh.follow(objects, "chain")
    after = await generate(updated)
    assert after.token_ids == (await generate(fresh)).token_ids != before.token_ids


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed_names_the_extra() -> None:
    config = EngineConfig(slots=4, engine="vllm")
    with pytest.raises(ConfigError, match="install the extra `vllm`"):
        start_engine(TINY, random_weights(TINY), 0, config, "replica")

"""Traps that other systems fell into (numbers of the survey), each against the real replica and chain.

The rest have their tests where their part is: 2 in weights/test_readers, 3 in weights/test_chain (a restarted
publisher continues), 10 in weights/test_overlap, 16 in test_health, test_fleet_health and faults/test_weight_chain_kill.
"""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from ostinato.infra.platform.errors import EngineError, StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.retention import list_readers
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation
from tests.fakes.tiny_model import TINY, random_weights

pytestmark = pytest.mark.asyncio
PREFIX = tuple(range(1, 31))


class Rig:
    """A chain with its publisher and a replica that follows it."""

    def __init__(self, directory: Path, **config) -> None:
        self.objects = ObjectStore.from_url(f"file://{directory}")
        self.publisher = ChainPublisher(self.objects, "c")
        self.publisher.publish(0, random_weights(TINY))
        self.replica = EngineReplica("r", TINY, EngineConfig(slots=4, **config))

    async def update(self, version: int) -> None:
        self.publisher.publish(version, random_weights(TINY, seed=version))
        await self.replica.update_to(version)

    async def fresh(self, version: int, **config) -> EngineReplica:
        replica = EngineReplica("fresh", TINY, EngineConfig(slots=4, **config))
        await replica.follow(self.objects, "c")
        await replica.update_to(version)
        return replica


async def sample(
    replica: EngineReplica, session: str, tokens: tuple[int, ...] = PREFIX, limit: int = 12
) -> Generation:
    request = GenerateRequest(f"of {session}", session, tokens, limit, (), seed=5)
    return await replica.generate(request)


async def keep_the_loop_busy() -> None:
    """Slows the engine's steps, which run in this loop, so that a thread's work ends before an answer does."""
    while True:
        time.sleep(0.05)
        await asyncio.sleep(0)


def assert_same(one: Generation, other: Generation) -> None:
    assert one.token_ids == other.token_ids
    np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-5)


async def test_trap_1_a_failed_apply_is_raised_recorded_and_stops_service(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.replica.follow(rig.objects, "c")
    bad = random_weights(TINY, seed=1)
    bad["model.norm.weight"][0] = float("nan")
    rig.publisher.publish(1, bad)
    with pytest.raises(EngineError, match="not finite"):
        await rig.replica.update_to(1)
    with pytest.raises(EngineError, match="stale"):
        await sample(rig.replica, "s")
    (record,) = list_readers(rig.objects, "c")
    assert (record.held_version, record.refused_version) == (0, 1)
    assert "not finite" in record.reason


async def test_trap_3_a_new_publisher_over_an_old_chain_never_begins_at_zero(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    await rig.replica.follow(rig.objects, "c")
    await rig.update(1)
    restarted = ChainPublisher(rig.objects, "c")
    with pytest.raises(StorageError, match="more than 1"):
        restarted.publish(0, random_weights(TINY, seed=9))
    assert restarted.publish(2, random_weights(TINY, seed=2)).base_version in (None, 1)
    await rig.replica.update_to(2)
    assert (await rig.replica.health())["version"] == 2


async def test_trap_4_every_converted_weight_is_of_the_new_version(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.replica.follow(rig.objects, "c")
    for version in (1, 2):
        await rig.update(version)
        updated = await sample(rig.replica, f"s{version}", PREFIX[version:])
        assert_same(updated, await sample(await rig.fresh(version), "s", PREFIX[version:]))


async def test_trap_5_the_draft_head_moves_with_the_trunk(tmp_path: Path) -> None:
    """With speculation on, stale draft weights would show as another share of accepted drafts."""
    config = {"draft_layers": 2}
    rig = Rig(tmp_path, **config)
    await rig.replica.follow(rig.objects, "c")
    await rig.update(1)
    after, fresh = await sample(rig.replica, "s"), await sample(await rig.fresh(1, **config), "s")
    assert_same(after, fresh)
    assert (after.draft_tokens_proposed, after.draft_tokens_accepted) == (
        fresh.draft_tokens_proposed,
        fresh.draft_tokens_accepted,
    )


async def test_trap_6_no_prefix_of_an_old_version_is_shared_with_a_new_session(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    await rig.replica.follow(rig.objects, "c")
    await sample(rig.replica, "old")
    await rig.update(1)
    assert_same(await sample(rig.replica, "new"), await sample(await rig.fresh(1), "s"))


async def test_trap_7_and_8_each_position_has_one_route_of_the_pass_that_made_its_log_prob(
    tmp_path: Path,
) -> None:
    """A swap in the middle of an answer: no position's route is missing, none comes twice, and tokens of the
    old version are exactly those an engine that never swapped would have made.
    """
    rig = Rig(tmp_path)
    await rig.replica.follow(rig.objects, "c")
    rig.publisher.publish(1, random_weights(TINY, seed=1))
    whole = await sample(await rig.fresh(0), "s", limit=60)
    slow = asyncio.create_task(keep_the_loop_busy())
    answering = asyncio.create_task(sample(rig.replica, "s", limit=60))
    while (await rig.replica.statistics())["generated_tokens"] < 5:
        await asyncio.sleep(0)
    await rig.replica.update_to(1)
    slow.cancel()
    mixed = await answering
    versions = mixed.weight_versions_T.tolist()
    assert versions == sorted(versions)
    old = versions.count(0)
    assert 0 < old < 60
    assert mixed.route_offset == 0
    assert len(mixed.routed_experts) == len(PREFIX) + 60 - 1
    rows = len(PREFIX) + old - 1  # positions fed before the first token of the new version
    assert mixed.token_ids[:old] == whole.token_ids[:old]
    np.testing.assert_array_equal(mixed.routed_experts[:rows], whole.routed_experts[:rows])
    np.testing.assert_allclose(mixed.logprobs_T[:old], whole.logprobs_T[:old], atol=1e-5)

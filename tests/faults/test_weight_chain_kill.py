"""SIGKILL of a publisher and of a replica before every single operation on the store, and two publishers that
meet at every single operation: the chain stays sound, nobody serves what was not verified.
"""

import asyncio
import contextlib
import multiprocessing
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.engine.health import ReplicaState
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.infra.serving.weights.manifest import list_versions, read_manifest
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.shard_publisher import PublisherFenced
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from tests.fakes.tiny_model import TINY, random_weights
from tests.faults.weight_chain_programs import TroubledStore, deadly_store, open_store, weights_of
from tests.unit.infra.serving.weights.strategies import same_bits

LAST = 5
# A fork of the test runner would take the locks of its other threads (Ray's, pytest's) along.
CLEAN_FORKS = multiprocessing.get_context("forkserver")
CLEAN_FORKS.set_forkserver_preload([__name__])


def publish_up_to_last(directory: Path, operation_number: int) -> None:
    """Goes on where the chain ends, anchors and garbage collection included."""
    store = deadly_store(directory, operation_number)
    publisher = ChainPublisher(store, "c", anchor_every=2, keep_versions=2)
    last = publisher.resume()
    for version in range(0 if last is None else last.version + 1, LAST + 1):
        publisher.publish(version, weights_of(version))


def run_in_process(program: Callable[[], None]) -> bool:
    """Whether the program came to its end; False when it was killed on the way."""
    process = CLEAN_FORKS.Process(target=program)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def check_chain(directory: Path) -> int:
    """Every version committed is whole; returns the newest, -1 for none."""
    store = open_store(directory)
    versions = list_versions(store, "c")
    for version in versions:
        assert same_bits(ChainSubscriber(store, "c").fetch(version), weights_of(version))
    return versions[-1] if versions else -1


# the nightly kills before each operation
@pytest.mark.parametrize("stride", [15, pytest.param(1, marks=pytest.mark.nightly)])
def test_publisher_killed_before_an_operation_leaves_a_sound_chain(
    tmp_path: Path, stride: int
) -> None:
    start = tmp_path / "start"
    first = ChainPublisher(open_store(start), "c", anchor_every=2, keep_versions=2)
    first.publish(0, weights_of(0))
    operation_number, is_done = 0, False
    while not is_done:
        operation_number += stride
        directory = tmp_path / f"run-{operation_number}"
        shutil.copytree(start, directory)
        follower = ChainSubscriber(open_store(directory), "c")
        follower.fetch(0)
        is_done = run_in_process(partial(publish_up_to_last, directory, operation_number))
        newest = check_chain(directory)
        assert newest >= 0
        publish_up_to_last(directory, 10**9)
        assert check_chain(directory) == LAST
        assert same_bits(follower.fetch(LAST), weights_of(LAST))
        shutil.rmtree(directory)
    assert operation_number > 30


def test_two_publishers_that_meet_at_each_operation_never_mix(tmp_path: Path) -> None:
    is_done, operation_number = False, 0
    while not is_done:
        operation_number += 1
        is_done = not meet_at(tmp_path / f"run-{operation_number}", operation_number)
    assert operation_number >= 6


def meet_at(directory: Path, operation_number: int) -> bool:
    """The old publisher writes version 1; before one of its operations the young one takes over and writes
    versions of its own. False when that operation was never reached.
    """
    store = open_store(directory)
    ChainPublisher(store, "c").publish(0, weights_of(0))
    is_armed, seen, young = False, 0, ChainPublisher(store, "c")
    young_weights = {name: tensor + 1.0 for name, tensor in weights_of(0).items()}

    def take_over(_operation: str, _key: str) -> None:
        nonlocal seen
        seen += is_armed
        if is_armed and seen == operation_number:
            young.resume()
            young.publish((young.last_version or 0) + 1, young_weights)

    old = ChainPublisher(TroubledStore(store, take_over), "c")
    old.resume()
    is_armed = True
    with contextlib.suppress(PublisherFenced):
        old.publish(1, weights_of(1))
    if seen < operation_number:
        return False
    with pytest.raises(PublisherFenced):
        old.publish(9, weights_of(9))
    for version in list_versions(store, "c")[1:]:
        is_old = read_manifest(store, "c", version).epoch == old._epoch
        wanted = weights_of(version) if is_old else young_weights
        assert same_bits(ChainSubscriber(store, "c").fetch(version), wanted)
    return True


def model_weights(version: int):
    return random_weights(TINY, seed=version)


def follow_and_update(directory: Path, operation_number: int) -> None:
    async def run() -> None:
        store = deadly_store(directory, operation_number)
        replica = EngineReplica("replica", TINY, EngineConfig(slots=2), (store, "c"))
        await replica.recover()
        publisher = ChainPublisher(open_store(directory), "c")
        for version in (1, 2):
            publisher.publish(version, model_weights(version))
            await replica.update_to(version)

    asyncio.run(run())


async def serve_again(directory: Path) -> None:
    """What Ray does after a death: the same arguments, a new process. It serves the newest version or nothing."""
    store = open_store(directory)
    replica = EngineReplica("replica", TINY, EngineConfig(slots=2), (store, "c"))
    request = GenerateRequest("r", "s", (1, 2, 3), 6, (), seed=1)
    with pytest.raises(EngineError, match="starting"):
        await replica.generate(request)
    assert (await replica.recover())["state"] == ReplicaState.SERVING
    newest = list_versions(store, "c")[-1]
    again = await replica.generate(request)
    assert set(again.weight_versions_T.tolist()) == {newest}
    fresh = EngineReplica("fresh", TINY, EngineConfig(slots=2))
    await fresh.follow(store, "c")
    assert (await fresh.generate(request)).token_ids == again.token_ids
    assert same_bits(ChainSubscriber(store, "c").fetch(newest), model_weights(newest))


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_trap_16_replica_killed_before_an_operation_comes_back_verified(
    tmp_path: Path, stride: int
) -> None:
    operation_number, is_done = 0, False
    while not is_done:
        operation_number += stride
        directory = tmp_path / f"run-{operation_number}"
        ChainPublisher(open_store(directory), "c").publish(0, model_weights(0))
        is_done = run_in_process(partial(follow_and_update, directory, operation_number))
        asyncio.run(serve_again(directory))
        shutil.rmtree(directory)
    assert operation_number > 10

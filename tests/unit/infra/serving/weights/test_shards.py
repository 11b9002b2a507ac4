"""Laws of many ranks: together they write what one would, and a version without one of them does not exist."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import ChainManifest, list_versions
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.shard_publisher import ShardPublisher
from ostinato.infra.serving.weights.shards import Waiting, shard_key, share_tensors
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from tests.unit.infra.serving.weights.strategies import changed, random_bits, same_bits, seeds
from tests.unit.infra.serving.weights.test_chain import spoil

Weights = dict[str, torch.Tensor]
QUICK = Waiting(timeout_seconds=20.0, poll_seconds=0.001)
BRIEF = Waiting(timeout_seconds=0.05, poll_seconds=0.005)


def open_store(directory: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{directory}")


def make_weights(generator: np.random.Generator) -> Weights:
    return {
        "embed": random_bits(generator, torch.bfloat16, (37, 8)),
        "mlp": random_bits(generator, torch.float32, (5, 23)),
        "expert.0": random_bits(generator, torch.float8_e4m3fn, (40,)),
        "expert.1": random_bits(generator, torch.bfloat16, (3, 9)),
    }


def own_shard(weights: Weights, shard: int, num_shards: int) -> Weights:
    """The tensors go round the ranks."""
    return {
        name: tensor
        for index, (name, tensor) in enumerate(weights.items())
        if index % num_shards == shard
    }


class Ranks:
    """All ranks of one trainer, each in a thread."""

    def __init__(self, store: ObjectStore, num_shards: int, anchor_every: int = 3) -> None:
        self.num_shards = num_shards
        self.first = ChainPublisher(
            store, "c", num_shards=num_shards, anchor_every=anchor_every, waiting=QUICK
        )
        self.others = [
            ShardPublisher(store, "c", shard=shard, num_shards=num_shards, waiting=QUICK)
            for shard in range(1, num_shards)
        ]
        last = self.first.resume()
        for other in self.others:
            other.resume(self.first.epoch, last)

    def publish(self, version: int, weights: Weights) -> ChainManifest:
        with ThreadPoolExecutor(self.num_shards) as pool:
            calls = [
                pool.submit(rank.publish, version, own_shard(weights, shard, self.num_shards))
                for shard, rank in enumerate([self.first, *self.others])
            ]
            return next(iter([call.result() for call in calls]))


@given(
    seeds,
    st.lists(st.sampled_from((0.0, 0.05, 0.5, 1.0)), min_size=1, max_size=5),
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
)
@settings(deadline=None, max_examples=12)
def test_shards_any_history_over_restarts_with_other_ranks_arrives_bit_for_bit(
    tmp_path_factory, seed: int, densities: list[float], ranks: list[int]
) -> None:
    store = open_store(tmp_path_factory.mktemp("chain"))
    generator = np.random.default_rng(seed)
    weights, version, history = make_weights(generator), 0, []
    follower = ChainSubscriber(store, "c")
    for num_shards in ranks:
        trainer = Ranks(store, num_shards)
        for density in densities:
            weights = {name: changed(t, generator, density) for name, t in weights.items()}
            trainer.publish(version, weights)
            assert same_bits(follower.fetch(version), weights)
            history.append(weights)
            version += 1
    late = ChainSubscriber(store, "c")
    assert all(same_bits(late.fetch(index), weights) for index, weights in enumerate(history))


def test_shards_a_version_without_one_rank_is_never_committed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    weights = make_weights(np.random.default_rng(0))
    publisher = ChainPublisher(store, "c", num_shards=2, waiting=BRIEF)
    with pytest.raises(StorageError, match=r"shard\.00000001\.00001\.json did not come"):
        publisher.publish(0, own_shard(weights, 0, 2))
    assert list_versions(store, "c") == []
    assert ChainSubscriber(store, "c").latest_version() is None


def test_shards_the_trainer_that_lost_a_rank_continues_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    generator = np.random.default_rng(1)
    history = [make_weights(generator)]
    Ranks(store, 2).publish(0, history[0])
    broken = ChainPublisher(store, "c", num_shards=2, waiting=BRIEF)
    history.append({name: changed(t, generator, 0.1) for name, t in history[0].items()})
    with pytest.raises(StorageError, match="did not come"):
        broken.publish(1, own_shard(history[1], 0, 2))
    manifest = Ranks(store, 2).publish(1, history[1])
    assert (manifest.kind, manifest.base_version, manifest.num_shards) == ("delta", 0, 2)
    assert same_bits(ChainSubscriber(store, "c").fetch(1), history[1])
    left = [key for key in store.list("chains/c/00000001/") if ".00000002." in key]
    assert left  # what the broken epoch 2 wrote goes with its version


def test_shards_a_rank_of_a_replaced_trainer_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    weights = make_weights(np.random.default_rng(2))
    old = ShardPublisher(store, "c", shard=1, num_shards=2, waiting=QUICK)
    first = ChainPublisher(store, "c", num_shards=2)
    first.resume()
    old.resume(first.epoch, None)
    ChainPublisher(store, "c", num_shards=2).resume()
    with pytest.raises(StorageError, match="belongs to epoch 2"):
        old.publish(0, own_shard(weights, 1, 2))


def test_shards_a_damaged_shard_is_reported_and_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    weights = make_weights(np.random.default_rng(3))
    Ranks(store, 3).publish(0, weights)
    (key,) = [key for key in store.list("chains/c/00000000/") if ".00002.safetensors" in key]
    store.put_bytes(key, store.get_bytes(key)[:-7])
    with pytest.raises(StorageError, match=r"anchor\.00000001\.00002"):
        ChainSubscriber(store, "c").fetch(0)


@given(seeds, st.sampled_from(["missing", "torn", "flipped", "empty"]), st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_shards_any_one_damaged_object_is_survived_or_reported(
    tmp_path_factory, seed: int, damage: str, choice: int
) -> None:
    store = open_store(tmp_path_factory.mktemp("chain"))
    generator = np.random.default_rng(seed)
    history, trainer = [make_weights(generator)], Ranks(store, 2, anchor_every=2)
    for version in range(4):
        trainer.publish(version, history[-1])
        history.append({n: changed(t, generator, 0.03) for n, t in history[-1].items()})
    follower = ChainSubscriber(store, "c")
    follower.fetch(1)
    keys = [key for key in store.list("chains/c/") if "/epochs/" not in key]
    spoil(store, keys[choice % len(keys)], damage, choice)
    for subscriber in (follower, ChainSubscriber(store, "c")):
        for version in range(4):
            with contextlib.suppress(StorageError):  # reported: nothing was returned
                assert same_bits(subscriber.fetch(version), history[version])


def test_shards_a_torn_shard_record_is_never_committed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    weights = make_weights(np.random.default_rng(4))
    publisher = ChainPublisher(store, "c", num_shards=2, waiting=BRIEF)
    publisher.resume()
    store.put_bytes(shard_key("c", 0, publisher.epoch, 1), b'{"manifest": {"version"')
    with pytest.raises(StorageError, match="wanted a sealed"):
        publisher.publish(0, own_shard(weights, 0, 2))
    assert list_versions(store, "c") == []


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 1000), max_size=12), st.integers(1, 5))
@settings(deadline=None)
def test_share_gives_each_tensor_to_one_shard_and_evens_the_bytes(
    sizes_bytes: dict[str, int], num_shards: int
) -> None:
    shards = share_tensors(sizes_bytes, num_shards)
    assert shards == share_tensors(dict(reversed(sizes_bytes.items())), num_shards)
    assert shards.keys() == sizes_bytes.keys()
    loads = [0] * num_shards
    for name, shard in shards.items():
        loads[shard] += sizes_bytes[name]
    assert max(loads) - min(loads) <= max(sizes_bytes.values(), default=0)

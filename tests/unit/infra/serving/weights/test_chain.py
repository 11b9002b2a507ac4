"""Laws of the chain: bit-exact, damage is survived or reported, one writer at a time, and it outlives
its trainer."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import list_versions
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.retention import ORPHAN_GRACE_SECONDS, collect_garbage
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from tests.unit.infra.serving.weights.strategies import (
    changed,
    density_lists,
    layouts,
    random_bits,
    same_bits,
    seeds,
)

Weights = dict[str, torch.Tensor]
# A fork of the test runner would take the locks of its other threads along.
CLEAN_FORKS = multiprocessing.get_context("forkserver")
CLEAN_FORKS.set_forkserver_preload([__name__])


def open_store(directory: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{directory}")


def make_history(seed: int, densities: list[float], layout=None) -> list[Weights]:
    generator = np.random.default_rng(seed)
    layout = layout or {"a": (torch.float32, (4, 50)), "b": (torch.bfloat16, (600,))}
    history = [{name: random_bits(generator, *entry) for name, entry in layout.items()}]
    for density in densities:
        history.append({n: changed(t, generator, density) for n, t in history[-1].items()})
    return history


def publish_all(publisher: ChainPublisher, history: list[Weights], first: int = 0) -> None:
    for version, weights in enumerate(history, first):
        publisher.publish(version, weights)


@given(layouts, seeds, density_lists, st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_chain_any_history_arrives_bit_for_bit(
    tmp_path_factory, layout, seed: int, densities: list[float], anchor_every: int
) -> None:
    store = open_store(tmp_path_factory.mktemp("chain"))
    history = make_history(seed, densities, layout)
    publisher = ChainPublisher(store, "c", anchor_every=anchor_every)
    follower = ChainSubscriber(store, "c")
    for version, weights in enumerate(history):
        publisher.publish(version, weights)
        assert same_bits(follower.fetch(version), weights)
    late = ChainSubscriber(store, "c")
    order = np.random.default_rng(seed).permutation(len(history))
    assert all(same_bits(late.fetch(int(version)), history[version]) for version in order)


@given(
    seeds,
    st.sampled_from(["missing", "torn", "flipped", "empty", "swapped"]),
    st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=40)
def test_chain_any_one_damaged_object_is_survived_or_reported(
    tmp_path_factory, seed: int, damage: str, choice: int
) -> None:
    directory = tmp_path_factory.mktemp("chain")
    store = open_store(directory)
    history = make_history(seed, [0.02, 0.02, 0.3, 0.01, 0.02])
    publish_all(ChainPublisher(store, "c", anchor_every=2), history)
    follower = ChainSubscriber(store, "c")
    follower.fetch(1)
    keys = [key for key in store.list("chains/c/") if "/epochs/" not in key]
    if damage == "swapped":
        swap(store, keys[choice % len(keys)], keys[choice // len(keys) % len(keys)])
    else:
        spoil(store, keys[choice % len(keys)], damage, choice)
    for subscriber in (follower, ChainSubscriber(store, "c")):
        for version, weights in enumerate(history):
            with contextlib.suppress(StorageError):  # reported: nothing was returned
                assert same_bits(subscriber.fetch(version), weights)


def spoil(store: ObjectStore, key: str, damage: str, choice: int) -> None:
    data = store.get_bytes(key)
    if damage == "missing":
        store.delete(key)
    elif damage == "torn":
        store.put_bytes(key, data[: choice % len(data)])
    elif damage == "empty":
        store.put_bytes(key, b"")
    else:
        flipped = bytearray(data)
        flipped[choice % len(data)] ^= 1 << (choice % 8)
        store.put_bytes(key, bytes(flipped))


def swap(store: ObjectStore, one: str, other: str) -> None:
    """Two objects in each other's place."""
    first, second = store.get_bytes(one), store.get_bytes(other)
    store.put_bytes(one, second)
    store.put_bytes(other, first)


def test_chain_broken_delta_before_an_anchor_is_bridged_by_the_anchor(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(1, [0.01] * 4)
    publish_all(ChainPublisher(store, "c", anchor_every=3), history)
    follower = ChainSubscriber(store, "c")
    follower.fetch(1)
    (delta,) = [key for key in store.list("chains/c/00000002/") if "/delta." in key]
    store.delete(delta)
    assert same_bits(follower.fetch(4), history[4])
    with pytest.raises(StorageError, match="version 2"):
        follower.fetch(2)
    assert follower.held_version == 4


def test_chain_follower_that_is_stuck_is_freed_by_the_next_publish(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(2, [0.01] * 4)
    publisher = ChainPublisher(store, "c", anchor_every=100)
    publish_all(publisher, history[:3])
    (delta,) = [key for key in store.list("chains/c/00000001/") if "/delta." in key]
    store.delete(delta)
    with pytest.raises(StorageError, match="will be an anchor"):
        ChainSubscriber(store, "c").fetch(2)
    assert publisher.publish(3, history[3]).kind == "anchor"
    assert same_bits(ChainSubscriber(store, "c").fetch(3), history[3])
    assert publisher.publish(4, history[4]).kind == "delta"


def test_chain_restarted_publisher_continues_with_a_delta(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(3, [0.01] * 4)
    publish_all(ChainPublisher(store, "c"), history[:3])
    follower = ChainSubscriber(store, "c")
    follower.fetch(2)
    restarted = ChainPublisher(store, "c")
    last = restarted.resume()
    assert last is not None
    assert last.version == 2
    manifest = restarted.publish(3, history[3])
    assert (manifest.kind, manifest.base_version, manifest.epoch) == ("delta", 2, 2)
    assert same_bits(follower.fetch(3), history[3])


def test_chain_restart_over_a_damaged_last_version_writes_an_anchor(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(4, [0.01, 0.01])
    publish_all(ChainPublisher(store, "c"), history[:2])
    store.put_bytes("chains/c/00000001/manifest.json", b"{")
    restarted = ChainPublisher(store, "c")
    assert restarted.resume() is None
    assert restarted.publish(2, history[2]).kind == "anchor"
    assert same_bits(ChainSubscriber(store, "c").fetch(2), history[2])


def test_publish_by_a_replaced_publisher_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(5, [0.1, 0.1])
    old = ChainPublisher(store, "c")
    old.publish(0, history[0])
    young = ChainPublisher(store, "c")
    young.publish(1, history[1])
    with pytest.raises(StorageError, match="another took over"):
        old.publish(2, history[2])
    assert list_versions(store, "c") == [0, 1]


def test_publish_again_same_bits_is_answered_other_bits_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(6, [0.1])
    publisher = ChainPublisher(store, "c")
    first = publisher.publish(7, history[0])
    assert publisher.publish(7, history[0]) == first
    with pytest.raises(StorageError, match="more than 7"):
        publisher.publish(7, history[1])
    with pytest.raises(StorageError, match="more than 7"):
        publisher.publish(0, history[0])


def test_publish_when_everything_changes_is_an_anchor_each_time(tmp_path: Path) -> None:
    publisher = ChainPublisher(open_store(tmp_path), "c")
    history = make_history(7, [1.0, 1.0])
    manifests = [publisher.publish(version, weights) for version, weights in enumerate(history)]
    assert [manifest.kind for manifest in manifests] == ["anchor"] * 3
    assert manifests[2].density_ratio > 0.99


def test_publish_with_other_tensors_starts_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publisher = ChainPublisher(store, "c")
    publisher.publish(0, {"a": torch.zeros(4)})
    wider = {"a": torch.zeros(8), "b": torch.ones(2)}
    assert publisher.publish(1, wider).base_version is None
    assert same_bits(ChainSubscriber(store, "c").fetch(1), wider)


@given(seeds, st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_garbage_collection_never_cuts_what_a_kept_version_needs(
    tmp_path_factory, seed: int, keep: int, anchor_every: int
) -> None:
    store = open_store(tmp_path_factory.mktemp("chain"))
    history = make_history(seed, [0.01] * 8)
    publish_all(ChainPublisher(store, "c", anchor_every=anchor_every), history)
    deleted = collect_garbage(store, "c", keep_versions=keep)
    for version in range(9 - keep, 9):
        assert same_bits(ChainSubscriber(store, "c").fetch(version), history[version])
    assert not any(store.list(f"chains/c/{version:08d}/") for version in deleted)
    if keep == 1:
        assert len(list_versions(store, "c")) <= anchor_every + 1


def test_killed_publish_leaves_no_version_and_its_remains_are_collected(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = make_history(8, [0.01] * 2)
    publish_all(ChainPublisher(store, "c"), history[:2])
    torn = "chains/c/00000002/delta.00000001.safetensors.zst"
    store.put_bytes(torn, b"half a delta")
    assert ChainSubscriber(store, "c").latest_version() == 1
    restarted = ChainPublisher(store, "c")
    restarted.resume()
    assert store.exists(torn)  # who wrote it may be about to commit
    restarted = ChainPublisher(store, "c", clock=lambda: time.time() + 2 * ORPHAN_GRACE_SECONDS)
    restarted.resume()
    assert not store.exists(torn)
    restarted.publish(2, history[2])
    assert same_bits(ChainSubscriber(store, "c").fetch(2), history[2])


def weights_of(version: int) -> Weights:
    generator = torch.Generator().manual_seed(version // 4)  # every fourth step changes everything
    weights = {f"w{index}": torch.randn(5_000, generator=generator) for index in range(4)}
    weights["w0"][: version % 4 + 1] = float(version)
    return weights


def publish_for_ever(directory: Path) -> None:
    publisher = ChainPublisher(open_store(directory), "c", keep_versions=6)
    last = publisher.resume()
    for version in itertools.count(0 if last is None else last.version + 1):
        publisher.publish(version, weights_of(version))


def test_chain_publisher_killed_at_any_moment_leaves_a_sound_chain(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    seen = -1
    for round_index in range(4):
        process = CLEAN_FORKS.Process(target=publish_for_ever, args=(tmp_path,), daemon=True)
        process.start()
        while (ChainSubscriber(store, "c").latest_version() or 0) < seen + 6:
            assert process.is_alive()
            time.sleep(0.003 + 0.002 * round_index)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        latest = ChainSubscriber(store, "c").latest_version()
        assert latest is not None
        assert latest > seen
        for version in list_versions(store, "c")[-6:]:
            assert same_bits(ChainSubscriber(store, "c").fetch(version), weights_of(version))
        seen = latest

"""Readers' acknowledgements, and what they keep from being collected."""

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
from ostinato.infra.serving.weights.retention import (
    LEASE_SECONDS,
    ReaderRecord,
    collect_garbage,
    list_readers,
    reader_key,
    write_reader,
)
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from tests.unit.infra.serving.weights.strategies import changed, random_bits, same_bits

VERSIONS = 9


def publish_history(store: ObjectStore, anchor_every: int) -> list[dict[str, torch.Tensor]]:
    generator = np.random.default_rng(anchor_every)
    history = [{"w": random_bits(generator, torch.bfloat16, (500,))}]
    for _ in range(VERSIONS - 1):
        history.append({n: changed(t, generator, 0.02) for n, t in history[-1].items()})
    publisher = ChainPublisher(store, "c", anchor_every=anchor_every)
    for version, weights in enumerate(history):
        publisher.publish(version, weights)
    return history


def open_store(directory: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{directory}")


def test_reader_tells_what_it_fetches_holds_and_refuses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish_history(store, 3)
    reader = ChainSubscriber(store, "c", reader_id="r", clock=lambda: 7.0)
    reader.fetch(4)
    assert list_readers(store, "c") == [ReaderRecord(reader_id="r", wanted_version=4, at=7.0)]
    reader.acknowledge(4)
    assert list_readers(store, "c") == [ReaderRecord(reader_id="r", held_version=4, at=7.0)]
    reader.refuse(5, "not finite")
    (record,) = list_readers(store, "c")
    assert (record.held_version, record.refused_version, record.reason) == (4, 5, "not finite")


def test_subscriber_without_an_id_leaves_no_trace(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish_history(store, 3)
    before = store.list("chains/c/")
    ChainSubscriber(store, "c").fetch(8)
    assert store.list("chains/c/") == before


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.integers(0, VERSIONS - 1), max_size=3),
    st.lists(st.integers(0, VERSIONS - 1), max_size=2),
)
@settings(deadline=None, max_examples=25)
def test_trap_2_garbage_collection_cuts_no_base_that_a_reader_needs(
    tmp_path_factory, anchor_every: int, keep: int, held: list[int], wanted: list[int]
) -> None:
    store = open_store(tmp_path_factory.mktemp("chain"))
    history = publish_history(store, anchor_every)
    readers = []
    for index, version in enumerate(held):
        reader = ChainSubscriber(store, "c", reader_id=f"held-{index}", clock=lambda: 0.0)
        reader.fetch(version)
        reader.acknowledge(version)
        readers.append(reader)
    for index, version in enumerate(wanted):
        write_reader(
            store, "c", ReaderRecord(reader_id=f"wants-{index}", wanted_version=version, at=0.0)
        )
    kept_before = {v: _delta_keys(store, v) for v in range(min(held, default=0) + 1, VERSIONS)}
    collect_garbage(store, "c", keep_versions=keep, now=LEASE_SECONDS)
    for version in (*held, *wanted):
        assert same_bits(ChainSubscriber(store, "c").fetch(version), history[version])
    if held:
        assert {v: _delta_keys(store, v) for v in kept_before} == kept_before
    for reader in readers:
        assert same_bits(reader.fetch(VERSIONS - 1), history[-1])


def _delta_keys(store: ObjectStore, version: int) -> list[str]:
    return [key for key in store.list(f"chains/c/{version:08d}/") if "/delta." in key]


def test_reader_that_is_gone_holds_nothing_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish_history(store, 3)
    reader = ChainSubscriber(store, "c", reader_id="gone", clock=lambda: 0.0)
    reader.fetch(0)
    reader.acknowledge(0)
    collect_garbage(store, "c", keep_versions=1, now=LEASE_SECONDS)
    assert 0 in list_versions(store, "c")
    collect_garbage(store, "c", keep_versions=1, now=LEASE_SECONDS + 1.0)
    assert 0 not in list_versions(store, "c")


def test_garbage_collection_with_a_torn_record_deletes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish_history(store, 2)
    store.put_bytes(reader_key("c", "r"), b'{"manifest"')
    with pytest.raises(StorageError, match="wanted a sealed"):
        collect_garbage(store, "c", keep_versions=1)
    assert list_versions(store, "c") == list(range(VERSIONS))


def test_reader_that_cannot_be_written_still_gets_its_weights(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = publish_history(store, 3)
    (tmp_path / "chains/c/readers").write_text("a file where a folder is wanted")
    reader = ChainSubscriber(store, "c", reader_id="r")
    assert same_bits(reader.fetch(8), history[8])
    reader.acknowledge(8)
    assert reader.held_version == 8

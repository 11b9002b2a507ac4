"""Publishing beside training: the copy is taken at once, one version is under way, errors are told."""

import threading
from pathlib import Path

import pytest
import torch

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.shard_publisher import OverlappedPublisher
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from tests.faults.weight_chain_programs import TroubledStore
from tests.unit.infra.serving.weights.strategies import same_bits


class Gate:
    """Holds every put of a payload until it is opened; then may fail."""

    def __init__(self, directory: Path) -> None:
        self.inner = ObjectStore.from_url(f"file://{directory}")
        self.store = TroubledStore(self.inner, self.before)
        self.is_open = threading.Event()
        self.is_reached = threading.Event()
        self.error: Exception | None = None

    def before(self, operation: str, key: str) -> None:
        if operation == "put" and key.endswith(".zst"):
            self.is_reached.set()
            assert self.is_open.wait(20)
            if self.error is not None:
                raise self.error


def test_training_goes_on_in_place_while_the_copy_travels(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    publisher = OverlappedPublisher(ChainPublisher(gate.store, "c"))
    weights = {"w": torch.zeros(100)}
    assert publisher.start(0, weights) is None
    assert gate.is_reached.wait(20)
    weights["w"] += 1.0  # the next step, before the first byte has left
    gate.is_open.set()
    manifest = publisher.start(1, weights)
    assert manifest is not None
    assert manifest.version == 0
    publisher.close()
    subscriber = ChainSubscriber(gate.inner, "c")
    assert same_bits(subscriber.fetch(0), {"w": torch.zeros(100)})
    assert same_bits(subscriber.fetch(1), {"w": torch.ones(100)})


def test_the_next_version_waits_for_the_one_under_way(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    publisher = OverlappedPublisher(ChainPublisher(gate.store, "c"))
    publisher.start(0, {"w": torch.zeros(4)})
    assert gate.is_reached.wait(20)
    second = threading.Thread(target=publisher.start, args=(1, {"w": torch.ones(4)}))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert ChainSubscriber(gate.inner, "c").latest_version() is None
    gate.is_open.set()
    second.join(20)
    assert publisher.close() is not None
    assert ChainSubscriber(gate.inner, "c").latest_version() == 1


def start_to_fail(gate: Gate) -> OverlappedPublisher:
    """A publisher whose first version cannot be written."""
    gate.is_open.set()
    gate.error = StorageError("the disk is gone")
    publisher = OverlappedPublisher(ChainPublisher(gate.store, "c"))
    publisher.start(0, {"w": torch.zeros(4)})
    return publisher


def test_trap_10_a_failed_publish_is_raised_at_the_next_call(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    publisher = start_to_fail(gate)
    with pytest.raises(StorageError, match="disk is gone"):
        publisher.start(1, {"w": torch.ones(4)})
    assert not publisher.is_busy  # told once; what comes next starts from the chain as it is
    gate.error = None
    publisher.start(1, {"w": torch.ones(4)})
    manifest = publisher.close()
    assert manifest is not None
    assert manifest.kind == "anchor"


def test_trap_10_a_failed_publish_is_raised_when_closing(tmp_path: Path) -> None:
    publisher = start_to_fail(Gate(tmp_path))
    with pytest.raises(StorageError, match="disk is gone"):
        publisher.close()

"""Rival publishers of one chain, interleaved operation by operation: no committed version loses its payload."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import list_versions
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.subscriber import ChainSubscriber

RIVALS = 3


class Turns:
    """One thread at a time goes on, in an order given beforehand."""

    def __init__(self, order: list[int]) -> None:
        self._order = iter(order)
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._ended: set[int] = set()
        self._allowed: int | None = None

    def wait(self, name: int) -> None:
        """Until this thread's turn."""
        with self._changed:
            self._waiting.add(name)
            self._choose()
            self._changed.wait_for(lambda: self._allowed == name, timeout=60)
            self._waiting.discard(name)
            self._allowed = None

    def end(self, name: int) -> None:
        """The thread takes no more turns."""
        with self._changed:
            self._ended.add(name)
            self._choose()

    def _choose(self) -> None:
        if self._allowed is None and len(self._waiting) + len(self._ended) == RIVALS:
            ready = sorted(self._waiting)
            if ready:
                self._allowed = ready[next(self._order, 0) % len(ready)]
                self._changed.notify_all()


class TurnStore(ObjectStore):
    """A store each of whose operations waits for its thread's turn."""

    def __init__(self, inner: ObjectStore, turns: Turns, name: int) -> None:
        super().__init__(inner.url, inner._backend)
        self._turns, self._name = turns, name

    @contextmanager
    def _operation(self, verb: str, key: str) -> Iterator[None]:
        self._turns.wait(self._name)
        with super()._operation(verb, key):
            yield


def run_rivals(directory: Path, order: list[int], now: Callable[[], float]) -> ObjectStore:
    """A chain after all rivals have ended."""
    store = ObjectStore.from_url(f"file://{directory}")
    turns = Turns(order)
    base = ChainPublisher(store, "c", clock=now)
    base.publish(1, {"w": torch.arange(64.0)})

    def publish(name: int) -> None:
        publisher = ChainPublisher(TurnStore(store, turns, name), "c", clock=now)
        try:
            publisher.resume()
            for version in range(2, 5):
                publisher.publish(version, {"w": torch.arange(64.0) + version + 10 * name})
        except StorageError:
            pass  # another took over
        finally:
            turns.end(name)

    threads = [threading.Thread(target=publish, args=(name,)) for name in range(RIVALS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, RIVALS - 1), min_size=20, max_size=120))
def test_a_committed_version_keeps_its_payload_with_rival_publishers(order: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = run_rivals(Path(directory), order, lambda: 1_000.0)
        for version in list_versions(store, "c"):
            assert ChainSubscriber(store, "c").fetch(version)["w"].numel() == 64

"""What the chain's kill tests run and break: a store that ends its process, and weights by version."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ostinato.infra.platform.objects import ObjectStore

Result = TypeVar("Result")
Weights = dict[str, torch.Tensor]


def open_store(directory: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{directory}")


def weights_of(version: int) -> Weights:
    """Version 3n changes everything, the others a few elements."""
    generator = torch.Generator().manual_seed(version // 3)
    weights = {f"w{index}": torch.randn(600, generator=generator) for index in range(3)}
    weights["w0"][: version % 3 + 1] = float(version)
    return weights


class TroubledStore(ObjectStore):
    """A store that calls `before(operation, key)` before each operation."""

    def __init__(self, inner: ObjectStore, before: Callable[[str, str], None]) -> None:
        self.url = inner.url
        self._inner = inner
        self._before = before

    def put_bytes(self, key: str, data: bytes) -> str:
        self._before("put", key)
        return self._inner.put_bytes(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        self._before("put_new", key)
        return self._inner.put_new(key, data)

    def get_bytes(self, key: str, checksum: str | None = None) -> bytes:
        self._before("get", key)
        return self._inner.get_bytes(key, checksum)

    def exists(self, key: str) -> bool:
        self._before("exists", key)
        return self._inner.exists(key)

    def list(self, prefix: str = "") -> list[str]:
        self._before("list", prefix)
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._before("delete", key)
        self._inner.delete(key)


def deadly_store(directory: Path, operation_number: int) -> TroubledStore:
    """SIGKILL before the operation of that number, with half an upload left where it was to go."""
    seen = 0

    def die(operation: str, key: str) -> None:
        nonlocal seen
        seen += 1
        if seen < operation_number:
            return
        if operation.startswith("put"):
            torn = directory / Path(key).parent / ".put-torn"
            torn.parent.mkdir(parents=True, exist_ok=True)
            torn.write_bytes(b"half an object")
        os.kill(os.getpid(), signal.SIGKILL)

    return TroubledStore(open_store(directory), die)

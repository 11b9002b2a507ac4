"""Protocol by which several ranks write one version together, through the object store alone.

Rank 0 writes the plan of a version, every rank uploads its shard and then its shard record, and
rank 0 commits the manifest when all records are there. No collective operation is needed, so
publishing can run in a thread during training.

    chains/{chain_id}/{version:08d}/plan.{epoch:08d}.json             payloads that every rank must write
    chains/{chain_id}/{version:08d}/shard.{epoch:08d}.{shard:05d}.json   written last by that rank
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import Field

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.record import Record
from ostinato.infra.serving.weights.manifest import (
    ChainObject,
    Sealed,
    TensorEntry,
    open_record,
    version_prefix,
)

POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 600.0  # a rank may still be in its step when the first one publishes


class PublishPlan(Record):
    """Plan of one version for all ranks."""

    version: int
    epoch: int
    num_shards: int
    base_version: int | None = Field(
        description="version the delta starts from; None: no delta, an anchor alone"
    )
    has_anchor: bool


class ShardRecord(Record):
    """Record of one rank's part of a version."""

    version: int
    epoch: int
    shard: int
    delta: ChainObject | None
    anchor: ChainObject | None
    tensors: dict[str, TensorEntry]
    changed_elements: int
    total_elements: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Time limit and polling of one rank's wait for another. `check` runs between polls and may raise."""

    timeout_seconds: float = TIMEOUT_SECONDS
    poll_seconds: float = POLL_SECONDS
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    check: Callable[[], None] = lambda: None

    def wait_for_object(
        self,
        objects: ObjectStore,
        key: str,
        wanted: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for an object. `wanted` ends the error's message. `check` runs between polls and may raise."""
        deadline = self.clock() + self.timeout_seconds
        while not objects.exists(key):
            check()
            if self.clock() >= deadline:
                raise StorageError(
                    f"{key} did not come within {self.timeout_seconds:.0f} s, wanted it {wanted}"
                )
            self.check()
            self.sleep(self.poll_seconds)


def plan_key(chain_id: str, version: int, epoch: int) -> str:
    return f"{version_prefix(chain_id, version)}/plan.{epoch:08d}.json"


def shard_key(chain_id: str, version: int, epoch: int, shard: int) -> str:
    return f"{version_prefix(chain_id, version)}/shard.{epoch:08d}.{shard:05d}.json"


def await_record(
    objects: ObjectStore,
    kind: type[Sealed],
    key: str,
    waiting: Waiting,
    check: Callable[[], None] = lambda: None,
) -> Sealed:
    """The record once it is there. `check` runs between polls and may raise."""
    waiting.wait_for_object(objects, key, "from the rank that writes it", check)
    return open_record(kind, key, objects.get_bytes(key))


def share_tensors(sizes_bytes: Mapping[str, int], num_shards: int) -> dict[str, int]:
    """The shard of every tensor, when each rank holds all tensors. The largest come first, each goes to the shard with
    the fewest bytes. Every rank gets the same result; readers find it in the manifest's entries.
    """
    loads = [0] * num_shards
    shards: dict[str, int] = {}
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        shards[name] = loads.index(min(loads))
        loads[shards[name]] += sizes_bytes[name]
    return shards

"""Publishing by one rank, and publishing during training.

`Publisher` keeps a copy of the rank's last published tensors and uploads changes from it. That copy is
replaced only after a version is committed, so a failed publish changes nothing. `ShardPublisher` is for every
rank except the first, which uses `ChainPublisher` and gives the others its epoch. `OverlappedPublisher` commits
staged weights in a thread. The next `start` waits for it, so a slow store slows training down, and versions
neither pile up in memory nor overtake one another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.codec import (
    TensorChanges,
    difference,
    encode_payload,
    in_threads,
    size_bytes,
    tensor_checksum,
    whole,
)
from ostinato.infra.serving.weights.manifest import (
    ChainManifest,
    ChainObject,
    TensorEntry,
    list_epochs,
    manifest_key,
    payload_key,
    read_manifest,
    seal_record,
)
from ostinato.infra.serving.weights.retrying_store import RetryingStore
from ostinato.infra.serving.weights.shards import (
    PublishPlan,
    ShardRecord,
    Waiting,
    await_record,
    plan_key,
    shard_key,
)
from ostinato.infra.serving.weights.subscriber import ChainSubscriber

AnchorRule = Callable[[ChainObject | None, TensorChanges], bool]
Tensors = Mapping[str, torch.Tensor]


class PublisherFenced(StorageError):
    """A publish under an old epoch: another publisher owns the chain now, so this one may never write again."""


class Publisher(ABC):
    """One rank's part of a publish, in two halves: `ChainPublisher` on the first rank, `ShardPublisher` on the others."""

    def __init__(
        self,
        objects: ObjectStore,
        chain_id: str,
        *,
        shard: int,
        num_shards: int,
        waiting: Waiting | None = None,
    ) -> None:
        if not 0 <= shard < num_shards:
            raise ValueError(
                f"shard is {shard} of {num_shards}, wanted 0 or more and less ({chain_id})"
            )
        self.chain_id = chain_id
        self._objects = RetryingStore.around(objects)
        self._shard = shard
        self._num_shards = num_shards
        self._waiting = waiting or Waiting()
        self._epoch: int | None = None
        self._base: Tensors | None = None  # start of the next delta

    @property
    def has_epoch(self) -> bool:
        """False before `resume` and after a failed publish, when the chain's content is not known."""
        return self._epoch is not None

    @property
    def epoch(self) -> int:
        """Number of the claim under which the ranks write."""
        if self._epoch is None:
            raise StorageError(
                f"chain {self.chain_id}: shard {self._shard} has no epoch, wanted resume() before"
            )
        return self._epoch

    def holds(self, newest: ChainManifest | None, weights: Tensors, num_tensors: int) -> bool:
        """Whether a committed version has `num_tensors` tensors and contains `weights` bit for bit, in any shard."""
        if newest is None or len(newest.tensors) != num_tensors:
            return False
        entries = {
            name: entry.model_copy(update={"shard": self._shard})
            for name, entry in newest.tensors.items()
            if name in weights
        }
        return entries == self._describe(weights)

    def publish(self, version: int, weights: Tensors) -> ChainManifest:
        return self.commit(version, self.stage(weights))

    def stage(self, weights: Tensors) -> Tensors:
        """The first half of publish: a copy, which is the next base. The weights may change afterwards."""

        def copy(name: str) -> torch.Tensor:
            return weights[name].detach().cpu().clone(memory_format=torch.contiguous_format)

        copies = in_threads(copy, weights, size_bytes(weights))
        return dict(zip(weights, copies, strict=True))

    @abstractmethod
    def commit(self, version: int, staged: Tensors) -> ChainManifest:
        """The second half of publish, which may run during training."""

    def _describe(self, tensors: Tensors) -> dict[str, TensorEntry]:
        """Entry of every tensor as the manifest names it."""

        def entry(name: str) -> TensorEntry:
            tensor = tensors[name].detach().cpu()
            return TensorEntry(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                checksum=tensor_checksum(tensor),
                shard=self._shard,
            )

        found = in_threads(entry, tensors, size_bytes(tensors))
        return dict(zip(tensors, found, strict=True))

    def _upload(
        self,
        version: int,
        staged: Tensors,
        entries: dict[str, TensorEntry],
        *,
        has_delta: Callable[[TensorChanges, TensorChanges], bool],
        has_anchor: AnchorRule,
    ) -> ShardRecord:
        """Uploads the payloads that the rules ask for. `has_delta` gets the changes and all tensors,
        `has_anchor` the uploaded delta and all tensors.
        """
        everything = whole(staged)
        changes = everything if self._base is None else difference(self._base, staged)
        delta = anchor = None
        if has_delta(changes, everything):
            delta = self._put(version, "delta", changes)
        if has_anchor(delta, everything):
            anchor = self._put(version, "anchor", everything)
        return ShardRecord(
            version=version,
            epoch=self.epoch,
            shard=self._shard,
            delta=delta,
            anchor=anchor,
            tensors=entries,
            changed_elements=changes.changed_elements,
            total_elements=everything.changed_elements,
            raw_bytes=everything.size_bytes,
        )

    def _upload_planned(
        self, plan: PublishPlan, staged: Tensors, entries: dict[str, TensorEntry]
    ) -> ShardRecord:
        return self._upload(
            plan.version,
            staged,
            entries,
            has_delta=lambda *_: plan.base_version is not None,
            has_anchor=lambda *_: plan.has_anchor,
        )

    def _put(self, version: int, kind: str, changes: TensorChanges) -> ChainObject:
        data = encode_payload(changes)
        shard = self._shard if self._num_shards > 1 else None
        key = payload_key(self.chain_id, version, kind, self.epoch, shard)
        self._objects.put_bytes(key, data)
        return ChainObject(key=key, size_bytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))

    def _check_fence(self, version: int) -> None:
        newest = max(list_epochs(self._objects, self.chain_id), default=0)
        if newest != self._epoch:
            raise PublisherFenced(
                f"chain {self.chain_id}: shard {self._shard} of version {version} refused, it holds epoch "
                f"{self._epoch} and the chain belongs to epoch {newest}: another took over"
            )


class ShardPublisher(Publisher):
    """Publishes one shard of each version, except the first, which is ChainPublisher's. Used by one thread at a time."""

    _base_version: int | None = None

    def resume(self, epoch: int, last: ChainManifest | None) -> None:
        """Joins the first rank's epoch and continues from the version that the first rank resumed (None: none)."""
        self._epoch, self._base_version, self._base = epoch, None, None
        if last is None or last.num_shards != self._num_shards:
            return
        subscriber = ChainSubscriber(self._objects, self.chain_id, shard=self._shard)
        try:
            self._base = subscriber.fetch(last.version)
            self._base_version = last.version
        except StorageError:
            self._base = None  # the shard's next delta then holds whole tensors

    def commit(self, version: int, staged: Tensors) -> ChainManifest:
        """Uploads the shard of `version` and returns once the first rank has committed it."""
        epoch = self.epoch
        entries = self._describe(staged)
        plan = await_record(
            self._objects,
            PublishPlan,
            plan_key(self.chain_id, version, epoch),
            self._waiting,
            lambda: self._check_fence(version),
        )
        if plan.base_version != self._base_version:
            self._base = None  # this rank lacks the base, so its delta holds whole tensors
        record = self._upload_planned(plan, staged, entries)
        key = shard_key(self.chain_id, version, epoch, self._shard)
        self._objects.put_bytes(key, seal_record(record))
        manifest = self._await_commit(version)
        self._base = staged
        self._base_version = version
        return manifest

    def _await_commit(self, version: int) -> ChainManifest:
        self._waiting.wait_for_object(
            self._objects,
            manifest_key(self.chain_id, version),
            f"committed after shard {self._shard} was uploaded",
            lambda: self._check_fence(version),
        )
        manifest = read_manifest(self._objects, self.chain_id, version)
        if manifest.epoch != self._epoch:
            raise StorageError(
                f"chain {self.chain_id}: version {version} was committed by epoch {manifest.epoch}, "
                f"wanted {self._epoch}: another publisher took over"
            )
        return manifest


class OverlappedPublisher:
    """A publisher with its own thread. Used by one thread at a time."""

    def __init__(
        self, publisher: Publisher, on_error: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """`on_error`: called in the publishing thread with the error that the next call will raise."""
        self._publisher = publisher
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._pending: Future[ChainManifest] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a version is being published, or its error was not raised yet."""
        return self._pending is not None

    def start(self, version: int, weights: Tensors) -> ChainManifest | None:
        """Copies the weights and commits them in the background, after the pending version is finished.
        Returns that version's manifest (None: there was none).
        """
        before = self.finish()
        staged = self._publisher.stage(weights)
        self._pending = self._thread.submit(self._commit, version, staged)
        return before

    def finish(self) -> ChainManifest | None:
        """Waits for the pending version and returns its manifest, or raises its error. None when there is none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> ChainManifest | None:
        """As finish, and ends the thread."""
        try:
            return self.finish()
        finally:
            self._thread.shutdown()

    def _commit(self, version: int, staged: Tensors) -> ChainManifest:
        try:
            return self._publisher.commit(version, staged)
        except BaseException as error:
            self._on_error(error)
            raise

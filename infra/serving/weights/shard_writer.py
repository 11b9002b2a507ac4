"""One rank's end of publishing: the copy of its tensors published last, and the upload of what changed.

That copy is replaced only after a version is committed, so a failed publish changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import xxhash

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.chain_manifest import (
    ChainManifest,
    ChainObject,
    TensorEntry,
    list_epochs,
    payload_key,
)
from ostinato.infra.serving.weights.codec import (
    Changes,
    difference,
    encode_payload,
    in_threads,
    size_bytes,
    tensor_checksum,
    whole,
)
from ostinato.infra.serving.weights.patient_store import PatientStore
from ostinato.infra.serving.weights.shards import PublishPlan, ShardRecord, Waiting

AnchorRule = Callable[[ChainObject | None, Changes], bool]
Tensors = Mapping[str, torch.Tensor]


class PublisherFenced(StorageError):
    """Another publisher owns the chain now. This one may never write again."""


class Publisher(ABC):
    """One rank's end of a publish, in two halves: `ChainPublisher` on the first rank, `ShardPublisher` on the others."""

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
        self._objects = PatientStore.around(objects)
        self._shard = shard
        self._num_shards = num_shards
        self._waiting = waiting or Waiting()
        self._epoch: int | None = None
        self._base: Tensors | None = None  # what the next delta starts from

    @property
    def has_epoch(self) -> bool:
        """False before `resume` and after a publish that failed: what the chain holds is not known then."""
        return self._epoch is not None

    @property
    def epoch(self) -> int:
        """The claim under which the ranks write."""
        if self._epoch is None:
            raise StorageError(
                f"chain {self.chain_id}: shard {self._shard} has no epoch, wanted resume() before"
            )
        return self._epoch

    def publish(self, version: int, weights: Tensors) -> ChainManifest:
        return self.commit(version, self.stage(weights))

    def stage(self, weights: Tensors) -> Tensors:
        """The first half of publish: a copy, which is the next base. The weights may change after it."""

        def copy(name: str) -> torch.Tensor:
            return weights[name].detach().cpu().clone(memory_format=torch.contiguous_format)

        copies = in_threads(copy, weights, size_bytes(weights))
        return dict(zip(weights, copies, strict=True))

    @abstractmethod
    def commit(self, version: int, staged: Tensors) -> ChainManifest:
        """The second half of publish, which may run beside training."""

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
        has_delta: Callable[[Changes, Changes], bool],
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

    def _put(self, version: int, kind: str, changes: Changes) -> ChainObject:
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

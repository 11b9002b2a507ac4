"""One rank's hand in publishing: its tensors, the copy published last, and the upload of what changed.

The copy published last moves on only after the version is committed (`adopt`), so a publish that
fails changes nothing. It neither commits nor claims the chain.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.codec import (
    Changes,
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
    TensorPart,
    list_epochs,
    payload_key,
)
from ostinato.infra.serving.weights.patient_store import PatientStore
from ostinato.infra.serving.weights.shards import ShardRecord, Waiting

AnchorRule = Callable[[ChainObject | None, Changes], bool]


@dataclass(frozen=True, slots=True)
class StagedShard:
    """A copy of one rank's tensors at one version."""

    tensors: dict[str, torch.Tensor]
    parts: dict[str, TensorPart]


class ShardWriter:
    """Encodes and uploads one shard of a chain."""

    def __init__(self, objects: ObjectStore, chain_id: str, shard: int, num_shards: int) -> None:
        self._objects = objects
        self._chain_id = chain_id
        self._shard = shard
        self._num_shards = num_shards
        self.base: dict[str, torch.Tensor] | None = None

    def describe(
        self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, TensorPart]
    ) -> dict[str, TensorEntry]:
        """Entry of every tensor as the manifest names it."""

        def entry(name: str) -> TensorEntry:
            tensor = tensors[name].detach().cpu()
            return TensorEntry(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                checksum=tensor_checksum(tensor),
                shard=self._shard,
                part=parts.get(name),
            )

        found = in_threads(entry, tensors, size_bytes(tensors))
        return dict(zip(tensors, found, strict=True))

    def stage(
        self, weights: Mapping[str, torch.Tensor], parts: Mapping[str, TensorPart]
    ) -> StagedShard:
        """A copy: the caller goes on training in place while it is encoded and kept as the next base."""

        def copy(name: str) -> torch.Tensor:
            return weights[name].detach().cpu().clone(memory_format=torch.contiguous_format)

        copies = in_threads(copy, weights, size_bytes(weights))
        return StagedShard(dict(zip(weights, copies, strict=True)), dict(parts))

    def upload(
        self,
        staged: StagedShard,
        entries: dict[str, TensorEntry],
        version: int,
        epoch: int,
        *,
        has_delta: Callable[[Changes, Changes], bool],
        has_anchor: AnchorRule,
    ) -> ShardRecord:
        """Puts the payloads that the rules ask for. They see what changed and what there is in all."""
        everything = whole(staged.tensors)
        changes = everything if self.base is None else difference(self.base, staged.tensors)
        delta = anchor = None
        if has_delta(changes, everything):
            delta = self._put(version, "delta", epoch, changes)
        if has_anchor(delta, everything):
            anchor = self._put(version, "anchor", epoch, everything)
        return ShardRecord(
            version=version,
            epoch=epoch,
            shard=self._shard,
            delta=delta,
            anchor=anchor,
            tensors=entries,
            changed_elements=changes.changed_elements,
            total_elements=everything.changed_elements,
            raw_bytes=everything.size_bytes,
        )

    def adopt(self, staged: StagedShard) -> None:
        """The staged copy was committed: the next delta starts from it."""
        self.base = staged.tensors

    def _put(self, version: int, kind: str, epoch: int, changes: Changes) -> ChainObject:
        data = encode_payload(changes)
        shard = self._shard if self._num_shards > 1 else None
        key = payload_key(self._chain_id, version, kind, epoch, shard)
        self._objects.put_bytes(key, data)
        return ChainObject(key=key, size_bytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))


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
        waiting: Waiting | None,
    ) -> None:
        self.chain_id = chain_id
        self._objects = PatientStore.around(objects)
        self._shard = shard
        self._num_shards = num_shards
        self._waiting = waiting or Waiting()
        self._epoch: int | None = None
        self._writer = ShardWriter(self._objects, chain_id, shard, num_shards)

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

    def publish(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        parts: Mapping[str, TensorPart] | None = None,
    ) -> ChainManifest:
        """Commits `weights` as `version`. `parts` names those that are stretches of larger tensors."""
        return self.commit(version, self.stage(weights, parts))

    def stage(
        self,
        weights: Mapping[str, torch.Tensor],
        parts: Mapping[str, TensorPart] | None = None,
    ) -> StagedShard:
        """The first half of publish: a copy, after which the weights may change."""
        return self._writer.stage(weights, parts or {})

    @abstractmethod
    def commit(self, version: int, staged: StagedShard) -> ChainManifest:
        """The second half of publish, which may run beside training."""

    def _check_fence(self, version: int) -> None:
        newest = max(list_epochs(self._objects, self.chain_id), default=0)
        if newest != self._epoch:
            raise PublisherFenced(
                f"chain {self.chain_id}: shard {self._shard} of version {version} refused, it holds epoch "
                f"{self._epoch} and the chain belongs to epoch {newest}: another took over"
            )

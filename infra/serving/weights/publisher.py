"""The writing end of a weight chain.

`ChainPublisher`: one per trainer, on its first rank. It continues the chain of a trainer that died,
and refuses to write once a newer publisher has claimed the chain. It gets tensors by name and knows no
models. One thread at a time may use it. Other ranks have a `ShardPublisher`.
"""

import logging
import time
from collections.abc import Callable, Mapping

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.codec import TensorChanges
from ostinato.infra.serving.weights.manifest import (
    ChainManifest,
    ChainObject,
    EpochClaim,
    TensorEntry,
    anchor_wanted_key,
    commit_manifest,
    epoch_key,
    list_epochs,
    list_versions,
    list_wanted_anchors,
    read_manifest,
    seal_record,
)
from ostinato.infra.serving.weights.retention import collect_garbage, collect_orphans
from ostinato.infra.serving.weights.shard_publisher import Publisher, PublisherFenced, Tensors
from ostinato.infra.serving.weights.shards import (
    PublishPlan,
    ShardRecord,
    Waiting,
    await_record,
    plan_key,
    shard_key,
)
from ostinato.infra.serving.weights.subscriber import ChainSubscriber

logger = logging.getLogger(__name__)

WORTHWHILE_RATIO = 0.7  # of the anchor's size before compression; larger deltas are not written
COLLECT_EVERY = 4  # publishes


class ChainPublisher(Publisher):
    """Publishes versions of one set of weights as anchors and deltas."""

    def __init__(
        self,
        objects: ObjectStore,
        chain_id: str,
        *,
        anchor_every: int = 25,
        keep_versions: int | None = None,
        num_shards: int = 1,
        clock: Callable[[], float] = time.time,
        waiting: Waiting | None = None,
    ) -> None:
        """`keep_versions`: newest versions that are never deleted (None: all). `num_shards` ranks write together."""
        if anchor_every < 1 or num_shards < 1:
            raise ValueError(
                f"anchor_every is {anchor_every} and num_shards {num_shards}, wanted at least 1 ({chain_id})"
            )
        super().__init__(objects, chain_id, shard=0, num_shards=num_shards, waiting=waiting)
        self._anchor_every = anchor_every
        self._keep_versions = keep_versions
        self._clock = clock
        self._last_version: int | None = None
        self._last_manifest: ChainManifest | None = None
        self._commits = 0

    @property
    def last_version(self) -> int | None:
        """Newest committed version this publisher knows of. None before the first."""
        return self._last_version

    def resume(self) -> ChainManifest | None:
        """Claims the chain and continues from its newest version, which it returns. None when the chain is new.

        When that version cannot be rebuilt bit for bit, the result is None too. Its number still counts, and the
        next publish is an anchor.
        """
        self._epoch = self._claim_epoch()
        self._last_version, self._last_manifest, self._base = None, None, None
        versions = list_versions(self._objects, self.chain_id)
        if not versions:
            return None
        collect_orphans(self._objects, self.chain_id, now=self._clock())
        self._last_version = versions[-1]
        shard = 0 if self._num_shards > 1 else None
        try:
            subscriber = ChainSubscriber(self._objects, self.chain_id, shard=shard)
            self._base = subscriber.fetch(versions[-1])
            self._last_manifest = read_manifest(self._objects, self.chain_id, versions[-1])
        except StorageError as error:
            self._base = None
            logger.warning(
                "chain=%s version=%d cannot be rebuilt, next publish is an anchor: %s",
                self.chain_id, versions[-1], error,
            )  # fmt: skip
        return self._last_manifest

    def commit(self, version: int, staged: Tensors) -> ChainManifest:
        """Commits the staged weights as `version`, which must be newer than the last.

        A repeated version returns its manifest if the bits are the same, and is refused otherwise. After a failure
        the next publish reads the chain again under a new epoch, since the failed version may have been committed.
        """
        if self._epoch is None:
            self.resume()
        entries = self._describe(staged)
        if self._last_version is not None and version <= self._last_version:
            return self._published_before(version, entries)
        try:
            manifest = self._write(version, staged, entries)
        except PublisherFenced:
            raise
        except BaseException:
            self._epoch = None
            raise
        self._last_version, self._last_manifest = version, manifest
        self._base = staged
        self._delete_garbage(manifest)
        logger.info(
            "chain=%s version=%d kind=%s density=%.4f stored_bytes=%d",
            self.chain_id, version, manifest.kind, manifest.density_ratio, manifest.stored_bytes,
        )  # fmt: skip
        return manifest

    def _write(
        self, version: int, staged: Tensors, entries: dict[str, TensorEntry]
    ) -> ChainManifest:
        self._check_fence(version)
        upload = self._upload_alone if self._num_shards == 1 else self._upload_together
        manifest = self._manifest(version, upload(version, staged, entries))
        self._check_fence(version)
        if not commit_manifest(self._objects, manifest):
            self._check_is_ours(manifest)
        return manifest

    def _upload_alone(
        self, version: int, staged: Tensors, entries: dict[str, TensorEntry]
    ) -> list[ShardRecord]:
        last = self._last_manifest
        if last is not None and _layouts(last.tensors) != _layouts(entries):
            self._base = None  # the sets of tensors or their shapes differ, so there are no changes to encode

        def is_anchor_due(delta: ChainObject | None, everything: TensorChanges) -> bool:
            if delta is None or last is None:
                return True
            delta_bytes = last.delta_bytes_since_anchor + delta.size_bytes
            return (
                last.deltas_since_anchor + 1 >= self._anchor_every
                or delta_bytes > everything.size_bytes
                or self._is_anchor_wanted()
            )

        # A delta near the size of an anchor saves no reader a download: then the version is only an anchor.
        record = self._upload(
            version,
            staged,
            entries,
            has_delta=lambda changes, everything: (
                self._base is not None
                and changes.size_bytes < WORTHWHILE_RATIO * everything.size_bytes
            ),
            has_anchor=is_anchor_due,
        )
        return [record]

    def _upload_together(
        self, version: int, staged: Tensors, entries: dict[str, TensorEntry]
    ) -> list[ShardRecord]:
        last, epoch = self._last_manifest, self.epoch
        can_follow = last is not None and last.num_shards == self._num_shards
        plan = PublishPlan(
            version=version,
            epoch=epoch,
            num_shards=self._num_shards,
            base_version=self._last_version if can_follow else None,
            has_anchor=last is None
            or not can_follow
            or last.deltas_since_anchor + 1 >= self._anchor_every
            or last.delta_bytes_since_anchor > last.raw_bytes
            or self._is_anchor_wanted(),
        )
        self._objects.put_bytes(plan_key(self.chain_id, version, epoch), seal_record(plan))
        records = [self._upload_planned(plan, staged, entries)]
        for shard in range(1, self._num_shards):
            key = shard_key(self.chain_id, version, epoch, shard)
            records.append(await_record(self._objects, ShardRecord, key, self._waiting))
        return records

    def _manifest(self, version: int, shards: list[ShardRecord]) -> ChainManifest:
        last = self._last_manifest
        delta = tuple(shard.delta for shard in shards if shard.delta is not None)
        anchor = tuple(shard.anchor for shard in shards if shard.anchor is not None)
        tensors = {name: entry for shard in shards for name, entry in shard.tensors.items()}
        names = sum(len(shard.tensors) for shard in shards)
        if len(tensors) != names or not {len(delta), len(anchor)} <= {0, len(shards)}:
            raise StorageError(
                f"chain {self.chain_id}: version {version} has {len(delta)} deltas and {len(anchor)} anchors of "
                f"{len(shards)} shards, and {names} tensors with {len(tensors)} different names; wanted a delta or an "
                "anchor of all shards or of none, and every name once"
            )
        follows = bool(delta) and not anchor and last is not None
        delta_bytes = sum(item.size_bytes for item in delta)
        return ChainManifest(
            chain_id=self.chain_id,
            version=version,
            epoch=self.epoch,
            base_version=self._last_version if delta else None,
            delta=delta,
            anchor=anchor,
            tensors=tensors,
            changed_elements=sum(shard.changed_elements for shard in shards),
            total_elements=sum(shard.total_elements for shard in shards),
            raw_bytes=sum(shard.raw_bytes for shard in shards),
            deltas_since_anchor=last.deltas_since_anchor + 1 if follows and last else 0,
            delta_bytes_since_anchor=last.delta_bytes_since_anchor + delta_bytes
            if follows and last
            else 0,
            published_at=self._clock(),
        )

    def _check_is_ours(self, manifest: ChainManifest) -> None:
        """StorageError unless the committed manifest is this one, as after a retry of a put that had succeeded."""
        found = read_manifest(self._objects, self.chain_id, manifest.version)
        if found == manifest:
            return
        self._check_fence(manifest.version)
        raise StorageError(
            f"chain {self.chain_id}: version {manifest.version} refused, another publisher committed it "
            f"in epoch {found.epoch}, before this one of epoch {self._epoch} could; wanted a newer version"
        )

    def _is_anchor_wanted(self) -> bool:
        return bool(list_wanted_anchors(self._objects, self.chain_id))

    def _published_before(self, version: int, entries: dict[str, TensorEntry]) -> ChainManifest:
        last = self._last_manifest
        if last is not None and last.version == version:
            own = {name: entry for name, entry in last.tensors.items() if entry.shard == 0}
            if own == entries:
                return last
        raise StorageError(
            f"chain {self.chain_id}: publish of version {version}, wanted more than {self._last_version}, "
            "the last committed one (its bits differ or cannot be read)"
        )

    def _claim_epoch(self) -> int:
        while True:
            epoch = max(list_epochs(self._objects, self.chain_id), default=0) + 1
            claim = EpochClaim(epoch=epoch, claimed_at=self._clock())
            if self._objects.put_new(
                epoch_key(self.chain_id, epoch), claim.model_dump_json().encode()
            ):
                return epoch

    def _delete_garbage(self, manifest: ChainManifest) -> None:
        """Deletes fulfilled requests for an anchor, orphans, and versions that nobody needs."""
        self._commits += 1
        try:
            if manifest.kind == "anchor":
                for version in list_wanted_anchors(self._objects, self.chain_id):
                    self._objects.delete(anchor_wanted_key(self.chain_id, version))
            if self._commits % COLLECT_EVERY == 0:
                collect_orphans(self._objects, self.chain_id, now=self._clock())
            if self._keep_versions is not None and self._commits % COLLECT_EVERY == 0:
                collect_garbage(
                    self._objects,
                    self.chain_id,
                    keep_versions=self._keep_versions,
                    now=self._clock(),
                )
        except StorageError as error:  # the version is committed; the rest is collected later
            logger.warning(
                "chain=%s version=%d garbage remains: %s", self.chain_id, manifest.version, error
            )


def _layouts(entries: Mapping[str, TensorEntry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

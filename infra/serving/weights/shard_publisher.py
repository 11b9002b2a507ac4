"""The writing end of a weight chain on every rank but the first.

It claims no epoch: the first rank's is handed to it.
"""

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.serving.chain_manifest import (
    ChainManifest,
    manifest_key,
    read_manifest,
    seal_record,
)
from ostinato.infra.serving.weights.shard_writer import Publisher, Tensors
from ostinato.infra.serving.weights.shards import (
    PublishPlan,
    await_record,
    plan_key,
    shard_key,
)
from ostinato.infra.serving.weights.subscriber import ChainSubscriber


class ShardPublisher(Publisher):
    """Publishes one shard of each version, not the first, which is ChainPublisher's. Used by one thread at a time."""

    _base_version: int | None = None

    def resume(self, epoch: int, last: ChainManifest | None) -> None:
        """Joins the first rank's epoch and takes up the version it took up (None: none)."""
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
            self._base = None  # it does not hold the base: its delta holds whole tensors
        record = self._upload_planned(plan, staged, entries)
        key = shard_key(self.chain_id, version, epoch, self._shard)
        self._objects.put_bytes(key, seal_record(record))
        manifest = self._await_commit(version)
        self._base = staged
        self._base_version = version
        return manifest

    def _await_commit(self, version: int) -> ChainManifest:
        self._waiting.until_there(
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

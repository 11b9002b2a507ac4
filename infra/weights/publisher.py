"""The writing end of a weight chain.

Owns `ChainPublisher`: one per trainer. Enters: all weights at a new version. Leaves: a committed
version in the object store. It continues the chain of a trainer that died, and refuses to write
once a younger publisher has claimed the chain. It does not read trainers' models, and one instance
is used by one thread at a time.
"""

import logging
import time
from collections.abc import Callable, Mapping

import torch
import xxhash

from infra.errors import StorageError
from infra.objects import ObjectStore
from infra.weights.codec import Changes, difference, encode_payload, tensor_checksum, whole
from infra.weights.manifest import (
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
    payload_key,
    read_manifest,
)
from infra.weights.retention import collect_garbage, collect_orphans
from infra.weights.subscriber import ChainSubscriber

logger = logging.getLogger(__name__)

WORTHWHILE_RATIO = 0.7  # of the anchor's size, before compression
COLLECT_EVERY = 4  # publishes


class ChainPublisher:
    """Publishes versions of one set of weights as anchors and deltas."""

    def __init__(
        self,
        objects: ObjectStore,
        chain_id: str,
        *,
        anchor_every: int = 25,
        keep_versions: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keep_versions` newest versions survive each publish (None: all do)."""
        if anchor_every < 1:
            raise ValueError(f"anchor_every is {anchor_every}, wanted at least 1 ({chain_id})")
        self.chain_id = chain_id
        self._objects = objects
        self._anchor_every = anchor_every
        self._keep_versions = keep_versions
        self._clock = clock
        self._epoch: int | None = None
        self._last_version: int | None = None
        self._last_manifest: ChainManifest | None = None
        self._base: dict[str, torch.Tensor] | None = None
        self._commits = 0

    @property
    def last_version(self) -> int | None:
        """Newest committed version this publisher knows of; None before the first."""
        return self._last_version

    @property
    def last_manifest(self) -> ChainManifest | None:
        """Commit record of last_version; None when there is none or it cannot be read."""
        return self._last_manifest

    def holds(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the newest committed version is exactly these weights, bit for bit."""
        last = self._last_manifest
        return last is not None and last.tensors == {
            name: _entry(tensor.detach().cpu()) for name, tensor in weights.items()
        }

    def resume(self) -> ChainManifest | None:
        """Claims the chain and takes up its newest version; None when the chain is new.

        When that version cannot be rebuilt bit for bit its number still counts, and the next publish is an anchor.
        """
        self._epoch = self._claim_epoch()
        self._last_version, self._last_manifest, self._base = None, None, None
        versions = list_versions(self._objects, self.chain_id)
        if not versions:
            return None
        collect_orphans(self._objects, self.chain_id)
        self._last_version = versions[-1]
        try:
            self._base = ChainSubscriber(self._objects, self.chain_id).fetch(versions[-1])
            self._last_manifest = read_manifest(self._objects, self.chain_id, versions[-1])
        except StorageError as error:
            self._base = None
            logger.warning(
                "chain=%s version=%d cannot be rebuilt, next publish is an anchor: %s",
                self.chain_id, versions[-1], error,
            )  # fmt: skip
        return self._last_manifest

    def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> ChainManifest:
        """Commits `weights` as `version`, which must be newer than the last.

        The same version with the same bits again is answered with its manifest; with other bits it is refused.
        """
        if self._epoch is None:
            self.resume()
        # Clones: the caller goes on training in place while these are encoded and kept as the next base.
        tensors = {
            name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()
        }
        entries = {name: _entry(tensor) for name, tensor in tensors.items()}
        if self._last_version is not None and version <= self._last_version:
            return self._published_before(version, entries)
        last = self._last_manifest
        if last is not None and _layouts(last.tensors) != _layouts(entries):
            self._base = None  # tensors came, went or changed shape: no difference to take
        self._check_fence(version)
        manifest = self._upload(version, tensors, entries)
        self._check_fence(version)
        if not commit_manifest(self._objects, manifest):
            raise StorageError(
                f"chain {self.chain_id}: version {version} refused, another publisher committed it"
            )
        self._last_version, self._last_manifest, self._base = version, manifest, tensors
        if manifest.kind == "anchor":
            self._clear_wanted()
        self._collect(version)
        logger.info(
            "chain=%s version=%d kind=%s density=%.4f stored_bytes=%d",
            self.chain_id, version, manifest.kind, manifest.density_ratio, manifest.stored_bytes,
        )  # fmt: skip
        return manifest

    def _upload(
        self, version: int, tensors: dict[str, torch.Tensor], entries: dict[str, TensorEntry]
    ) -> ChainManifest:
        assert self._epoch is not None
        everything = whole(tensors)
        changes = everything if self._base is None else difference(self._base, tensors)
        # A delta near the size of an anchor saves nobody a download: then the version is an anchor alone.
        has_delta = (
            self._base is not None and changes.size_bytes < WORTHWHILE_RATIO * everything.size_bytes
        )
        delta = self._put(version, "delta", changes) if has_delta else None
        since, bytes_since = 0, 0
        if delta is not None and self._last_manifest is not None:
            since = self._last_manifest.deltas_since_anchor + 1
            bytes_since = self._last_manifest.delta_bytes_since_anchor + delta.size_bytes
        anchor = None
        if delta is None or self._is_anchor_due(since, bytes_since, everything.size_bytes):
            anchor, since, bytes_since = self._put(version, "anchor", everything), 0, 0
        return ChainManifest(
            chain_id=self.chain_id,
            version=version,
            epoch=self._epoch,
            base_version=None if delta is None else self._last_version,
            delta=delta,
            anchor=anchor,
            tensors=entries,
            changed_elements=changes.changed_elements,
            total_elements=everything.changed_elements,
            raw_bytes=everything.size_bytes,
            deltas_since_anchor=since,
            delta_bytes_since_anchor=bytes_since,
            published_at=self._clock(),
        )

    def _is_anchor_due(self, deltas: int, delta_bytes: int, anchor_bytes: int) -> bool:
        return (
            deltas >= self._anchor_every
            or delta_bytes > anchor_bytes
            or bool(list_wanted_anchors(self._objects, self.chain_id))
        )

    def _put(self, version: int, kind: str, changes: Changes) -> ChainObject:
        assert self._epoch is not None
        data = encode_payload(changes)
        key = payload_key(self.chain_id, version, kind, self._epoch)
        self._objects.put_bytes(key, data)
        return ChainObject(key=key, size_bytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))

    def _published_before(self, version: int, entries: dict[str, TensorEntry]) -> ChainManifest:
        last = self._last_manifest
        if last is not None and last.version == version and last.tensors == entries:
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

    def _check_fence(self, version: int) -> None:
        newest = max(list_epochs(self._objects, self.chain_id), default=0)
        if newest != self._epoch:
            raise StorageError(
                f"chain {self.chain_id}: version {version} refused, this publisher holds epoch "
                f"{self._epoch} and the chain belongs to epoch {newest}: another took over"
            )

    def _clear_wanted(self) -> None:
        for version in list_wanted_anchors(self._objects, self.chain_id):
            self._objects.delete(anchor_wanted_key(self.chain_id, version))

    def _collect(self, version: int) -> None:
        self._commits += 1
        if self._keep_versions is None or self._commits % COLLECT_EVERY:
            return
        try:
            collect_garbage(self._objects, self.chain_id, keep_versions=self._keep_versions)
        except (
            StorageError
        ) as error:  # the version is committed; what cannot be deleted now is met again later
            logger.warning("chain=%s version=%d garbage stays: %s", self.chain_id, version, error)


def _entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        checksum=tensor_checksum(tensor),
    )


def _layouts(entries: Mapping[str, TensorEntry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

"""The reading end of a weight chain.

`ChainSubscriber`: one per engine replica. It holds the newest version it built, so that the next
one costs only a delta. A subscriber with a reader id records on the chain the versions that it fetches, holds and
refuses, and garbage collection keeps those it needs.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash
import zstandard

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.codec import (
    decode_payload,
    in_threads,
    size_bytes,
    tensor_checksum,
)
from ostinato.infra.serving.weights.manifest import (
    ChainManifest,
    ChainObject,
    ShardObjects,
    TensorEntry,
    anchor_wanted_key,
    list_versions,
    read_manifest,
)
from ostinato.infra.serving.weights.retention import ReaderRecord, write_reader
from ostinato.infra.serving.weights.retrying_store import RetryingStore

logger = logging.getLogger(__name__)

DOWNLOADS = 8  # objects downloaded at once
_HEADER_BYTES, _ENTRY_BYTES = 1 << 16, 1 << 10  # of a payload's header: fixed, per tensor


@dataclass(frozen=True, slots=True)
class _BuildPath:
    """One way to build a version: an anchor or the held version, then deltas in order."""

    name: str
    anchor: ChainManifest | None
    deltas: tuple[ChainManifest, ...]

    @property
    def download_bytes(self) -> int:
        anchor = () if self.anchor is None else self.anchor.anchor
        return _delta_bytes(self.deltas) + sum(item.size_bytes for item in anchor)

    @property
    def stages(self) -> Iterator[tuple[ChainManifest, ShardObjects]]:
        """Versions on the path, each with the objects that lead to it."""
        if self.anchor is not None:
            yield self.anchor, self.anchor.anchor
        for manifest in self.deltas:
            yield manifest, manifest.delta


class ChainSubscriber:
    """Rebuilds published versions, from the held version or from an anchor."""

    def __init__(
        self,
        objects: ObjectStore,
        chain_id: str,
        *,
        reader_id: str | None = None,
        shard: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`reader_id`: name for records on the chain (None: no records). `shard`: the only one to build (None: all)."""
        self.chain_id = chain_id
        self._objects = RetryingStore.around(objects)
        self._reader_id = reader_id
        self._shard = shard
        self._clock = clock
        self._held: dict[str, torch.Tensor] | None = None
        self._held_manifest: ChainManifest | None = None
        self._applied_version: int | None = None

    @property
    def held_version(self) -> int | None:
        """The version held as the start of the next delta. None before the first fetch."""
        return None if self._held_manifest is None else self._held_manifest.version

    def latest_version(self) -> int | None:
        """Newest committed version. None while the chain is empty."""
        versions = list_versions(self._objects, self.chain_id)
        return versions[-1] if versions else None

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version by name, verified. They are shared with later fetches: do not write into them.

        The cheapest path is tried first, then every other one. When all fail, StorageError names each failure, and
        the publisher is asked for an anchor.
        """
        self._report(wanted_version=version)
        target = read_manifest(self._objects, self.chain_id, version)
        if self._held is not None and self._held_manifest == target:
            return dict(self._held)
        failures: list[str] = []
        for path in self._build_paths(target, failures):
            try:
                tensors = self._follow(path, target)
            except StorageError as error:
                logger.warning(
                    "chain=%s version=%d path=%s failed: %s",
                    self.chain_id,
                    version,
                    path.name,
                    error,
                )
                failures.append(f"{path.name}: {error}")
                continue
            self._held, self._held_manifest = tensors, target
            return dict(tensors)
        self._objects.put_bytes(anchor_wanted_key(self.chain_id, version), b"{}")
        raise StorageError(
            f"chain {self.chain_id}: version {version} cannot be built, wanted one sound build path: "
            + ("; ".join(failures) or "the chain holds no anchor at or before it")
            + "; the publisher's next version will be an anchor"
        )

    def acknowledge(self, version: int) -> None:
        """Records on the chain that `version` was applied and verified."""
        self._applied_version = version
        self._report()

    def refuse(self, version: int, reason: str) -> None:
        """Records on the chain that `version` could not be built or applied."""
        self._report(refused_version=version, reason=reason)

    def _report(
        self,
        *,
        wanted_version: int | None = None,
        refused_version: int | None = None,
        reason: str = "",
    ) -> None:
        if self._reader_id is None:
            return
        record = ReaderRecord(
            reader_id=self._reader_id,
            held_version=self._applied_version,
            wanted_version=wanted_version,
            refused_version=refused_version,
            reason=reason,
            at=self._clock(),
        )
        try:
            write_reader(self._objects, self.chain_id, record)
        except StorageError as error:  # not fatal: an unprotected reader can use an anchor
            logger.warning(
                "chain=%s reader=%s has no record: %s", self.chain_id, self._reader_id, error
            )

    def _build_paths(self, target: ChainManifest, failures: list[str]) -> Iterator[_BuildPath]:
        """Every path to the target: the cheaper of held version and nearest anchor, the other, then older anchors."""
        history = self._history(target, failures)
        first: list[_BuildPath] = []
        for current, deltas in history:
            if current.anchor:
                first.append(_BuildPath(f"anchor {current.version}", current, deltas))
            if current.delta and current.base_version == self.held_version is not None:
                first.append(_BuildPath(f"held {self.held_version}", None, (current, *deltas)))
                break
            is_behind = self.held_version is None or current.version <= self.held_version
            if first and (is_behind or _delta_bytes(deltas) > first[0].download_bytes):
                break
        yield from sorted(first, key=lambda path: path.download_bytes)
        for current, deltas in history:
            if current.anchor:
                yield _BuildPath(f"anchor {current.version}", current, deltas)

    def _history(
        self, target: ChainManifest, failures: list[str]
    ) -> Iterator[tuple[ChainManifest, tuple[ChainManifest, ...]]]:
        """The target and the versions that it starts from, newest first, each with the deltas from it to the target."""
        current, deltas = target, ()
        while True:
            yield current, deltas
            if not current.delta or current.base_version is None:
                return
            deltas = (current, *deltas)
            try:
                base = read_manifest(self._objects, self.chain_id, current.base_version)
            except StorageError as error:
                failures.append(f"before version {current.version}: {error}")
                return
            if base.epoch > current.epoch or base.version >= current.version:
                failures.append(
                    f"version {current.version} (epoch {current.epoch}) starts from version {base.version} "
                    f"(epoch {base.epoch}), wanted an older one"
                )
                return
            current = base

    def _follow(self, path: _BuildPath, target: ChainManifest) -> dict[str, torch.Tensor]:
        tensors = {} if path.anchor is not None else dict(self._held or {})
        stages = list(path.stages)
        own = slice(None) if self._shard is None else slice(self._shard, self._shard + 1)
        items = [objects[own] for _, objects in stages]
        payloads = self._download([item for selected in items for item in selected])
        for (manifest, _), selected in zip(stages, items, strict=True):
            for item in selected:
                tensors = _decode(item, next(payloads), tensors, _most_bytes(manifest))
            known = manifest.tensors.keys()
            tensors = {name: tensor for name, tensor in tensors.items() if name in known}
        self._verify(tensors, target)
        return tensors

    def _download(self, items: list[ChainObject]) -> Iterator[bytes]:
        """Checked bytes of each object, in order. Several are downloaded at once."""
        if len(items) < 2:
            yield from map(self._get, items)
            return
        with ThreadPoolExecutor(min(DOWNLOADS, len(items)), "download") as pool:
            yield from pool.map(self._get, items)

    def _get(self, item: ChainObject) -> bytes:
        data = self._objects.get_bytes(item.key)
        checksum = xxhash.xxh3_128_hexdigest(data)
        if checksum != item.checksum:
            raise StorageError(
                f"object {item.key}: {len(data)} bytes with checksum {checksum}, "
                f"wanted {item.size_bytes} bytes with {item.checksum}"
            )
        return data

    def _verify(self, tensors: dict[str, torch.Tensor], target: ChainManifest) -> None:
        entries = {
            name: entry
            for name, entry in target.tensors.items()
            if self._shard is None or entry.shard == self._shard
        }
        if tensors.keys() != entries.keys():
            odd = sorted(tensors.keys() ^ entries.keys())
            raise StorageError(
                f"chain {self.chain_id}: version {target.version} has other tensors than its manifest: {odd[:4]}"
            )

        def check(item: tuple[str, TensorEntry]) -> None:
            name, entry = item
            tensor = tensors[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            seen = (dtype, tuple(tensor.shape), tensor_checksum(tensor))
            if seen != (entry.dtype, entry.shape, entry.checksum):
                raise StorageError(
                    f"chain {self.chain_id}: version {target.version} tensor {name} is {seen}, "
                    f"wanted {(entry.dtype, entry.shape, entry.checksum)}"
                )

        in_threads(check, entries.items(), size_bytes(tensors))


def _decode(
    item: ChainObject, data: bytes, base: dict[str, torch.Tensor], max_bytes: int
) -> dict[str, torch.Tensor]:
    try:
        return decode_payload(data, base, max_bytes)
    except (zstandard.ZstdError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise StorageError(
            f"object {item.key}: does not decode ({error!r}), wanted a payload"
        ) from error


def _most_bytes(manifest: ChainManifest) -> int:
    """Unpacked size that no payload of a version exceeds: all tensors whole, and the header."""
    return manifest.raw_bytes + _HEADER_BYTES + _ENTRY_BYTES * len(manifest.tensors)


def _delta_bytes(deltas: tuple[ChainManifest, ...]) -> int:
    return sum(item.size_bytes for manifest in deltas for item in manifest.delta)

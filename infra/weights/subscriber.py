"""The reading end of a weight chain.

Owns `ChainSubscriber`: one per engine replica. Enters: a version number. Leaves: that version's
tensors, every one checked against the checksum its publisher took, or a StorageError; never
anything between. It holds the newest version it built, so that the next one costs only a delta.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
import zstandard
from safetensors import SafetensorError

from infra.errors import StorageError
from infra.objects import ObjectStore
from infra.weights.codec import decode_payload, tensor_checksum
from infra.weights.manifest import (
    ChainManifest,
    ChainObject,
    anchor_wanted_key,
    list_versions,
    read_manifest,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Road:
    """One way to build a version: an anchor or the held version, then deltas in order."""

    name: str
    anchor: ChainManifest | None
    deltas: tuple[ChainManifest, ...]

    @property
    def download_bytes(self) -> int:
        anchor = None if self.anchor is None else self.anchor.anchor
        return _delta_bytes(self.deltas) + (0 if anchor is None else anchor.size_bytes)


class ChainSubscriber:
    """Rebuilds published versions, from what it holds where it can and from an anchor where it must."""

    def __init__(self, objects: ObjectStore, chain_id: str) -> None:
        self.chain_id = chain_id
        self._objects = objects
        self._held: dict[str, torch.Tensor] | None = None
        self._held_manifest: ChainManifest | None = None

    @property
    def held_version(self) -> int | None:
        """The version held as the start of the next delta; None before the first fetch."""
        return None if self._held_manifest is None else self._held_manifest.version

    def latest_version(self) -> int | None:
        """Newest committed version; None while the chain is empty."""
        versions = list_versions(self._objects, self.chain_id)
        return versions[-1] if versions else None

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, verified. They are shared with later fetches: do not write into them.

        The cheapest road is tried first, then every other one; StorageError names what failed on each, and the
        publisher is asked for an anchor.
        """
        target = read_manifest(self._objects, self.chain_id, version)
        if self._held is not None and self._held_manifest == target:
            return dict(self._held)
        failures: list[str] = []
        for road in self._roads(target, failures):
            try:
                tensors = self._travel(road, target)
            except StorageError as error:
                logger.warning(
                    "chain=%s version=%d road=%s failed: %s",
                    self.chain_id,
                    version,
                    road.name,
                    error,
                )
                failures.append(f"{road.name}: {error}")
                continue
            self._held, self._held_manifest = tensors, target
            return dict(tensors)
        self.ask_for_anchor(version)
        raise StorageError(
            f"chain {self.chain_id}: version {version} cannot be built, wanted one sound road: "
            + ("; ".join(failures) or "the chain holds no anchor at or before it")
            + "; the publisher's next version will be an anchor"
        )

    def ask_for_anchor(self, version: int) -> None:
        """Tells the publisher that `version` could not be built, so that its next version is an anchor."""
        self._objects.put_bytes(anchor_wanted_key(self.chain_id, version), b"{}")

    def _roads(self, target: ChainManifest, failures: list[str]) -> Iterator[_Road]:
        """Every road to the target: the cheaper of held version and nearest anchor, the other, then older anchors."""
        history = self._history(target, failures)
        first: list[_Road] = []
        for current, deltas in history:
            if current.anchor is not None:
                first.append(_Road(f"anchor {current.version}", current, deltas))
            if current.delta is not None and current.base_version == self.held_version is not None:
                first.append(_Road(f"held {self.held_version}", None, (current, *deltas)))
                break
            is_behind = self.held_version is None or current.version <= self.held_version
            if first and (is_behind or _delta_bytes(deltas) > first[0].download_bytes):
                break
        yield from sorted(first, key=lambda road: road.download_bytes)
        for current, deltas in history:
            if current.anchor is not None:
                yield _Road(f"anchor {current.version}", current, deltas)

    def _history(
        self, target: ChainManifest, failures: list[str]
    ) -> Iterator[tuple[ChainManifest, tuple[ChainManifest, ...]]]:
        """The target and what it starts from, newest first, each with the deltas that lead from it to the target."""
        current, deltas = target, ()
        while True:
            yield current, deltas
            if current.delta is None or current.base_version is None:
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

    def _travel(self, road: _Road, target: ChainManifest) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {} if road.anchor is not None else dict(self._held or {})
        if road.anchor is not None:
            tensors = self._apply(road.anchor.anchor, tensors)
        for manifest in road.deltas:
            tensors = self._apply(manifest.delta, tensors)
        self._verify(tensors, target)
        return tensors

    def _apply(
        self, item: ChainObject | None, base: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        assert item is not None
        data = self._objects.get_bytes(item.key)
        checksum = xxhash.xxh3_128_hexdigest(data)
        if checksum != item.checksum:
            raise StorageError(
                f"object {item.key}: {len(data)} bytes with checksum {checksum}, "
                f"wanted {item.size_bytes} bytes with {item.checksum}"
            )
        try:
            return decode_payload(data, base)
        except (zstandard.ZstdError, SafetensorError, KeyError, IndexError, RuntimeError) as error:
            raise StorageError(
                f"object {item.key}: does not decode ({error!r}), wanted a payload"
            ) from error

    def _verify(self, tensors: dict[str, torch.Tensor], target: ChainManifest) -> None:
        if tensors.keys() != target.tensors.keys():
            odd = sorted(tensors.keys() ^ target.tensors.keys())
            raise StorageError(
                f"chain {self.chain_id}: version {target.version} has other tensors than its manifest: {odd[:4]}"
            )
        for name, entry in target.tensors.items():
            tensor = tensors[name]
            seen = (
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor_checksum(tensor),
            )
            if seen != (entry.dtype, entry.shape, entry.checksum):
                raise StorageError(
                    f"chain {self.chain_id}: version {target.version} tensor {name} is {seen}, "
                    f"wanted {(entry.dtype, entry.shape, entry.checksum)}"
                )


def _delta_bytes(deltas: tuple[ChainManifest, ...]) -> int:
    return sum(manifest.delta.size_bytes for manifest in deltas if manifest.delta is not None)

"""What of a weight chain may be deleted.

Owns `collect_garbage`. Enters: the chain and how many versions to keep. Leaves: the store without
what no kept version is built from. It never deletes an object that a kept version needs on its way
from the nearest anchor.
"""

from collections.abc import Iterable

from infra.errors import StorageError
from infra.objects import ObjectStore
from infra.weights.manifest import (
    chain_prefix,
    list_epochs,
    list_versions,
    manifest_key,
    read_manifest,
    version_prefix,
)


def collect_garbage(
    objects: ObjectStore, chain_id: str, *, keep_versions: int, pinned_versions: Iterable[int] = ()
) -> list[int]:
    """Deletes versions that neither the newest `keep_versions` nor the pinned ones are built from; returns them.

    A manifest goes before its objects, so that a reader never meets a committed version without its bytes. When a
    kept version's history cannot be read, nothing is deleted and StorageError says so.
    """
    if keep_versions < 1:
        raise ValueError(f"keep_versions is {keep_versions}, wanted at least 1 ({chain_id})")
    versions = list_versions(objects, chain_id)
    if not versions:
        return []
    kept = set(versions[-keep_versions:]) | (set(pinned_versions) & set(versions))
    if len(kept) == len(versions):
        return []
    needed: set[int] = set()
    for version in sorted(kept, reverse=True):
        needed |= _history(objects, chain_id, version, needed)
    doomed = [version for version in versions if version not in needed]
    for version in doomed:
        objects.delete(manifest_key(chain_id, version))
    for version in doomed:
        for key in list(objects.list(f"{version_prefix(chain_id, version)}/")):
            objects.delete(key)
    return doomed


def collect_orphans(objects: ObjectStore, chain_id: str) -> list[str]:
    """Deletes payloads of versions that replaced publishers never committed; returns their keys."""
    epochs = list_epochs(objects, chain_id)
    newest_epoch = f".{epochs[-1]:08d}." if epochs else ""
    prefix = f"{chain_prefix(chain_id)}/"
    committed = tuple(
        f"{version_prefix(chain_id, version)}/" for version in list_versions(objects, chain_id)
    )
    orphans = [
        key
        for key in objects.list(prefix)
        if key.endswith(".safetensors.zst")
        and newest_epoch not in key
        and not key.startswith(committed)
    ]
    for key in orphans:
        objects.delete(key)
    return orphans


def _history(objects: ObjectStore, chain_id: str, version: int, known: set[int]) -> set[int]:
    """The versions `version` is built from, itself included, back to the nearest anchor."""
    history: set[int] = set()
    current: int | None = version
    while current is not None and current not in known:
        manifest = read_manifest(objects, chain_id, current)
        history.add(current)
        if manifest.anchor is not None:
            return history
        if manifest.base_version is None:
            raise StorageError(
                f"chain {chain_id}: version {current} has neither anchor nor base, wanted one"
            )
        current = manifest.base_version
    return history

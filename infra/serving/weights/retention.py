"""Records of a weight chain's readers, and garbage collection, which keeps the versions that they need.

A record that its reader has not renewed within the lease no longer counts, so a dead replica cannot
protect versions for ever. Garbage collection never deletes an object that a kept version is built from, nor one
that a living reader holds, fetches or needs to reach the newest version.
"""

import itertools
import re
from collections.abc import Iterable

from pydantic import Field

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.record import Record
from ostinato.infra.serving.weights.manifest import (
    chain_prefix,
    claimed_at,
    list_epochs,
    list_versions,
    manifest_key,
    open_record,
    read_manifest,
    seal_record,
    version_prefix,
)

LEASE_SECONDS = 3600.0


class ReaderRecord(Record):
    """Latest report of one reader."""

    reader_id: str
    held_version: int | None = None
    """newest version applied and verified; None: none yet"""
    wanted_version: int | None = None
    """version being fetched now; None: none"""
    refused_version: int | None = None
    """version that could not be built or applied; None: none"""
    reason: str = Field(default="", description="reason of the refusal")
    at: float = Field(description="seconds since 1970")


def reader_key(chain_id: str, reader_id: str) -> str:
    return f"{chain_prefix(chain_id)}/readers/{reader_id}.json"


def write_reader(objects: ObjectStore, chain_id: str, record: ReaderRecord) -> None:
    """Replaces the reader's record."""
    objects.put_bytes(reader_key(chain_id, record.reader_id), seal_record(record))


def list_readers(
    objects: ObjectStore,
    chain_id: str,
    *,
    now: float | None = None,
) -> list[ReaderRecord]:
    """Every reader with a running lease (all of them when `now` is None), by id.

    A record that cannot be read raises StorageError: garbage collection must not guess.
    """
    prefix = f"{chain_prefix(chain_id)}/readers/"
    records = [
        open_record(ReaderRecord, key, objects.get_bytes(key)) for key in objects.list(prefix)
    ]
    return [record for record in records if now is None or now - record.at <= LEASE_SECONDS]


def needed_by_readers(
    objects: ObjectStore, chain_id: str, readers: Iterable[ReaderRecord], latest: int
) -> set[int]:
    """Versions that readers hold or fetch, and every version on the path from those to the newest."""
    needed: set[int] = set()
    for reader in readers:
        needed |= {v for v in (reader.held_version, reader.wanted_version) if v is not None}
    held = {reader.held_version for reader in readers if reader.held_version is not None}
    oldest, path, current = min(held, default=latest), [], latest
    while current > oldest:
        path.append(current)
        if current in held:
            needed |= set(path)
        try:
            manifest = read_manifest(objects, chain_id, current)
        except StorageError:
            return needed  # the path is broken here: readers of older versions use an anchor
        if not manifest.delta or manifest.base_version is None:
            return needed
        current = manifest.base_version
    if current in held:
        needed |= set(path)
    return needed


ORPHAN_GRACE_SECONDS = 3_600.0  # longer than any commit, and than clocks of machines differ
_IN_VERSION = re.compile(r"/\d{8,}/[^/]+\.\d{8,}\.[^/]*$")  # payloads, plans and shard records


def collect_garbage(
    objects: ObjectStore,
    chain_id: str,
    *,
    keep_versions: int,
    now: float | None = None,
) -> list[int]:
    """Deletes the versions that neither the newest `keep_versions` nor the readers' versions need, and returns them.

    Only readers with a lease that runs at `now` count (None: all readers). A manifest is deleted before its objects,
    so that a reader never finds a committed version without its bytes. StorageError, and no deletion, when a kept
    version's history or a reader's record cannot be read.
    """
    if keep_versions < 1:
        raise ValueError(f"keep_versions is {keep_versions}, wanted at least 1 ({chain_id})")
    versions = list_versions(objects, chain_id)
    if not versions:
        return []
    kept = set(versions[-keep_versions:])
    if len(kept) == len(versions):
        return []
    readers = list_readers(objects, chain_id, now=now)
    kept |= needed_by_readers(objects, chain_id, readers, versions[-1]) & set(versions)
    needed: set[int] = set()
    for version in sorted(kept, reverse=True):
        needed |= _history(objects, chain_id, version, needed)
    # Newest first, so that an interruption leaves no version without the objects that it is built from.
    doomed = [version for version in reversed(versions) if version not in needed]
    for version in doomed:
        objects.delete(manifest_key(chain_id, version))
    for version in doomed:
        for key in list(objects.list(f"{version_prefix(chain_id, version)}/")):
            objects.delete(key)
    return doomed


def collect_orphans(objects: ObjectStore, chain_id: str, *, now: float) -> list[str]:
    """Deletes objects of versions that were never committed. Returns their keys.

    A publisher that was replaced may be past its last check of the epochs and about to commit. So its
    objects stay until ORPHAN_GRACE_SECONDS after the claim that replaced it.
    """
    epochs = list_epochs(objects, chain_id)
    replaced = [
        f".{epoch:08d}."
        for epoch, successor in itertools.pairwise(epochs)
        if now - claimed_at(objects, chain_id, successor) > ORPHAN_GRACE_SECONDS
    ]
    written = [key for key in objects.list(f"{chain_prefix(chain_id)}/") if _IN_VERSION.search(key)]
    # read last, so that versions committed meanwhile are kept
    committed = tuple(
        f"{version_prefix(chain_id, version)}/" for version in list_versions(objects, chain_id)
    )
    orphans = [
        key
        for key in written
        if any(epoch in key for epoch in replaced) and not key.startswith(committed)
    ]
    for key in orphans:
        objects.delete(key)
    return orphans


def _history(objects: ObjectStore, chain_id: str, version: int, known: set[int]) -> set[int]:
    """The versions that `version` is built from, itself included, back to the nearest anchor."""
    history: set[int] = set()
    current: int | None = version
    while current is not None and current not in known:
        manifest = read_manifest(objects, chain_id, current)
        history.add(current)
        if manifest.anchor:
            return history
        if manifest.base_version is None:
            raise StorageError(
                f"chain {chain_id}: version {current} has neither anchor nor base, wanted one"
            )
        current = manifest.base_version
    return history

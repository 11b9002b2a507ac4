"""Records of a chain's readers: versions held, wanted and refused, and what they protect from deletion.

A record that its reader has not renewed within the lease no longer counts, so a dead replica protects
nothing for ever.
"""

from collections.abc import Iterable

from pydantic import Field

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.record import Record
from ostinato.infra.serving.chain_manifest import (
    chain_prefix,
    open_record,
    read_manifest,
    seal_record,
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
    reason: str = Field(default="", description="why it was refused")
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
    """Every reader whose lease runs (all of them when `now` is None), by id.

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
    """Versions readers hold or fetch, and every delta on the way from what they hold to the newest."""
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
            return needed  # the way is broken here: readers behind it go by an anchor
        if not manifest.delta or manifest.base_version is None:
            return needed
        current = manifest.base_version
    if current in held:
        needed |= set(path)
    return needed

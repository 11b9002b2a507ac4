"""A host's repository as a guest gets it, and how files of two moments differ."""

import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.infra.platform.errors import OutputLimit
from ostinato.infra.sandbox.snapshots.layers import (
    Entries,
    EntryKind,
    identify_entries,
    read_entries,
)
from ostinato.infra.sandbox.snapshots.store import SKIPPED_NAMES, is_hidden

MAX_DIFF_BYTES = 64 << 20
_TYPES = {
    EntryKind.FILE: tarfile.REGTYPE,
    EntryKind.FOLDER: tarfile.DIRTYPE,
    EntryKind.LINK: tarfile.SYMTYPE,
}


@dataclass(frozen=True, slots=True)
class Repository:
    """Files, folders and links, without caches and history."""

    key: str = ""  # hash of the content; empty: of no repository
    entries: Entries = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """Regular files by path."""
        return {
            path: entry.content
            for path, entry in self.entries.items()
            if entry.kind is EntryKind.FILE
        }

    def pack(self) -> bytes:
        """A tar archive of it."""
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path, entry in sorted(self.entries.items()):
                member = tarfile.TarInfo(path)
                member.type = _TYPES[entry.kind]
                member.mtime = entry.modified_ns // 1_000_000_000
                is_folder = entry.kind is EntryKind.FOLDER
                member.mode = entry.mode | (0o700 if is_folder else 0)  # it must be filled
                if entry.kind is EntryKind.LINK:
                    member.linkname = os.fsdecode(entry.content)
                    archive.addfile(member)
                else:
                    member.size = len(entry.content)
                    archive.addfile(member, io.BytesIO(entry.content))
        return target.getvalue()


def read_repository(folder: Path) -> Repository:
    """A folder of the host."""
    entries = {
        path: entry
        for path, entry in read_entries(folder).items()
        if not any(map(is_hidden, path.split("/")))
    }
    return Repository(identify_entries(entries), entries)


def compare_files(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Files that differ, as they are now; None: there is none any more. No caches."""
    changes: dict[str, bytes | None] = {}
    num_bytes = 0
    for path in sorted({*before, *now}):
        content = now.get(path)
        if content == before.get(path) or SKIPPED_NAMES.intersection(path.split("/")):
            continue
        changes[path] = content
        num_bytes += len(content or b"")
        if num_bytes > MAX_DIFF_BYTES:
            raise OutputLimit(f"diff of over {MAX_DIFF_BYTES} bytes at {path}")
    return changes

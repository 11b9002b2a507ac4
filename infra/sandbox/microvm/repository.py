"""A host's repository as a guest gets it."""

import io
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.infra.sandbox.snapshots.layers import (
    Entries,
    EntryKind,
    identify_entries,
    read_entries,
)
from ostinato.infra.sandbox.snapshots.store import files_of, is_hidden

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
        return files_of(self.entries)

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

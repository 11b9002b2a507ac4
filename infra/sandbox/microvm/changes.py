"""What a guest's repository differs in from the one it was made with, as a record.

The form in which changes travel from a guest and into another, their file on the host, and their
comparison. It reads no guest and no host repository itself.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame
from ostinato.infra.sandbox.snapshots.store import SKIPPED_NAMES, is_hidden


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or link."""

    kind: str  # file, folder, link
    mode: int
    target: str = ""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Changes:
    """Entries put into a repository after `removed` paths were taken out."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def to_request(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Fields and blobs of a `put`."""
        described = []
        for path, entry in self.entries.items():
            described.append({"path": path, "kind": entry.kind, "mode": entry.mode})
            if entry.kind == "link":
                described[-1]["target"] = entry.target
        contents = (entry.content for entry in self.entries.values() if entry.kind == "file")
        return {"entries": described, "removed": sorted(self.removed)}, tuple(contents)

    def encode(self) -> bytes:
        """One frame; equal changes give equal bytes."""
        ordered = Changes(dict(sorted(self.entries.items())), self.removed)
        fields, blobs = ordered.to_request()
        return encode_frame(fields, blobs)

    @property
    def num_bytes(self) -> int:
        """Content of its files."""
        return sum(len(entry.content) for entry in self.entries.values())

    def differing(self, other: "Changes") -> int:
        """Paths that one has and the other has not, or has otherwise."""
        paths = {*self.entries, *self.removed, *other.entries, *other.removed}
        return sum(
            self.entries.get(path) != other.entries.get(path)
            or (path in self.removed) != (path in other.removed)
            for path in paths
        )


def changes_of_reply(reply: Mapping[str, Any], blobs: list[bytes]) -> Changes:
    """What a guest answered to `changes`, or what `Changes.encode` holds."""
    contents = iter(blobs)
    entries = {}
    for item in reply["entries"]:
        is_file = item["kind"] == "file"
        content = next(contents) if is_file else b""
        entries[item["path"]] = Entry(
            item["kind"], int(item["mode"]), item.get("target", ""), content
        )
    return Changes(entries, frozenset(reply["removed"]))


def changes_of_files(files: Mapping[str, bytes | None]) -> Changes:
    """Files as a spec lays them over a repository; None: removed."""
    entries = {
        path: Entry("file", 0o644, content=content)
        for path, content in files.items()
        if content is not None
    }
    return Changes(entries, frozenset(path for path, content in files.items() if content is None))


def read_changes(path: Path) -> Changes:
    """Read a file that holds `Changes.encode`."""
    frames = FrameDecoder().feed(path.read_bytes())
    if len(frames) != 1:
        raise SandboxError(f"{path} holds {len(frames)} frames, wanted 1")
    return changes_of_reply(*frames[0])


def read_folder(folder: Path) -> Changes:
    """A host's repository as entries for an empty one, without its caches and history."""
    entries: dict[str, Entry] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(map(is_hidden, relative.parts)):
            continue
        name = relative.as_posix()
        if path.is_symlink():
            entries[name] = Entry("link", 0o777, target=str(path.readlink()))
        elif path.is_dir():
            entries[name] = Entry("folder", 0o755)
        elif path.is_file():
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            entries[name] = Entry("file", mode, content=path.read_bytes())
    return Changes(entries)


def hash_folder(folder: Path) -> str:
    """A key for what `read_folder` gives."""
    return hashlib.sha256(read_folder(folder).encode()).hexdigest()[:16]


def compare_files(
    now: Changes, before: Changes, read_pristine: Callable[[str], bytes | None]
) -> dict[str, bytes | None]:
    """Regular files that differ, as they are now; None: there is none any more. No caches."""
    paths = {*now.entries, *now.removed, *before.entries, *before.removed}
    paths = {path for path in paths if not SKIPPED_NAMES.intersection(path.split("/"))}
    different: dict[str, bytes | None] = {}
    for path in sorted(paths):
        content = _content_of(now, path, read_pristine)
        if content != _content_of(before, path, read_pristine):
            different[path] = content
    return different


def _content_of(
    changes: Changes, path: str, read_pristine: Callable[[str], bytes | None]
) -> bytes | None:
    entry = changes.entries.get(path)
    if entry is not None:
        return entry.content if entry.kind == "file" else None
    return None if path in changes.removed else read_pristine(path)

"""A tree of hashes over a repository: equal roots mean equal files, and what differs is found by
walking only the folders that differ.

A tree never changes; an update shares every folder it did not touch.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_EMPTY = hashlib.sha256(b"folder").digest()


def hash_content(content: bytes) -> bytes:
    """Hash of a file."""
    return hashlib.sha256(content).digest()


@dataclass(frozen=True, slots=True)
class MerkleTree:
    """One folder: its hash, its files' hashes and its sub-folders."""

    digest: bytes = _EMPTY
    files: Mapping[str, bytes] = field(default_factory=dict)
    folders: Mapping[str, "MerkleTree"] = field(default_factory=dict)

    @classmethod
    def from_files(cls, hashes: Mapping[str, bytes]) -> "MerkleTree":
        """The tree of these files (path -> hash)."""
        return cls().updated(dict(hashes))

    def updated(self, changes: Mapping[str, bytes | None]) -> "MerkleTree":
        """The tree with these files set, or removed where the hash is None."""
        files = dict(self.files)
        below: dict[str, dict[str, bytes | None]] = {}
        for path, digest in changes.items():
            head, slash, rest = path.partition("/")
            if slash:
                below.setdefault(head, {})[rest] = digest
            elif digest is None:
                files.pop(head, None)
            else:
                files[head] = digest
        folders = dict(self.folders)
        for name, inner in below.items():
            folder = folders.get(name, MerkleTree()).updated(inner)
            if folder.files or folder.folders:
                folders[name] = folder
            else:
                folders.pop(name, None)
        return MerkleTree(_digest(files, folders), files, folders)

    def changed_paths(self, other: "MerkleTree") -> Iterator[str]:
        """Paths whose file is another, or is in one tree only. Sorted."""
        return iter(sorted(self._changes(other, "")))

    def _changes(self, other: "MerkleTree", prefix: str) -> Iterator[str]:
        if self.digest == other.digest:
            return
        for name in self.files.keys() | other.files.keys():
            if self.files.get(name) != other.files.get(name):
                yield prefix + name
        for name in self.folders.keys() | other.folders.keys():
            mine = self.folders.get(name, MerkleTree())
            yours = other.folders.get(name, MerkleTree())
            yield from mine._changes(yours, f"{prefix}{name}/")


def _digest(files: Mapping[str, bytes], folders: Mapping[str, MerkleTree]) -> bytes:
    if not files and not folders:
        return _EMPTY
    digest = hashlib.sha256(b"folder")
    entries = [(name, b"f", content) for name, content in files.items()]
    entries += [(name, b"d", folder.digest) for name, folder in folders.items()]
    for name, kind, content in sorted(entries):
        encoded = name.encode()
        digest.update(kind + len(encoded).to_bytes(4, "little") + encoded + content)
    return digest.digest()

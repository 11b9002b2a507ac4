"""Objects as files under one directory. A put writes a temporary file beside the target and renames
it; once it returns, the object survives a power failure. Backends raise OSError, which `ObjectStore`
turns into StorageError.

The checksum of everything stored is xxh3-128 as 32 hex digits. It guards against damage, not against malice.
"""

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

import xxhash

from ostinato.models.flushing import flush

_TEMPORARY_PREFIX = ".put-"


class LocalBackend:
    """The `file://` backend."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, key: str, data: bytes) -> None:
        """Store atomically: a reader sees the old object or the whole new one."""
        self._place(key, lambda temporary: temporary.write_bytes(data), Path.replace)

    def write_new(self, key: str, data: bytes) -> bool:
        """Store only if the key is free. False when it is taken."""
        try:
            self._place(key, lambda temporary: temporary.write_bytes(data), _link)
        except FileExistsError:
            return False
        return True

    def upload(self, key: str, path: Path) -> None:
        self._place(key, lambda temporary: shutil.copyfile(path, temporary), Path.replace)

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def download(self, key: str, path: Path) -> None:
        shutil.copyfile(self.root / key, path)

    def exists(self, key: str) -> bool:
        """Whether the object is there now, not as of some earlier listing."""
        return (self.root / key).is_file()

    def keys(self, prefix: str) -> list[str]:
        folder = self.root / prefix.rpartition("/")[0]
        found = []
        for directory, _, names in os.walk(folder):
            relative = Path(directory).relative_to(self.root)
            found += [
                (relative / name).as_posix()
                for name in names
                if not name.startswith(_TEMPORARY_PREFIX)
            ]
        return sorted(key for key in found if key.startswith(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes by key of a folder, for prefixes that end with /."""
        return {key: (self.root / key).stat().st_size for key in self.keys(prefix)}

    def changed_at(self, prefix: str) -> dict[str, float]:
        """Time of the last write of each object, including uploads under way."""
        found = {}
        for directory, _, names in os.walk(self.root / prefix):
            for name in names:
                path = Path(directory) / name
                with contextlib.suppress(FileNotFoundError):  # an upload that ended meanwhile
                    found[path.relative_to(self.root).as_posix()] = path.stat().st_mtime
        return found

    def versions(self, path: str, suffix: str) -> dict[str, str]:
        """Checksums by key: of the file `path`, or of those below it that end in `suffix`."""
        below = [key for key in self.keys(f"{path}/" if path else "") if key.endswith(suffix)]
        keys = [path] if self.exists(path) else filter(self.exists, below)
        return {key: checksum_file(self.root / key) for key in keys}

    def open(self, key: str) -> IO[bytes]:
        return (self.root / key).open("rb")

    def remove(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)

    def _place(
        self,
        key: str,
        fill: Callable[[Path], object],
        move: Callable[[Path, Path], object],
    ) -> None:
        target = self.root / key
        present = next(folder for folder in target.parents if folder.is_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            temporary.touch(mode=0o600)  # transcripts of users are among the objects
            fill(temporary)
            flush(temporary)
            move(temporary, target)
            for folder in target.parents:  # directory entries of the object and of new folders
                flush(folder)
                if folder == present:
                    break
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _link(temporary: Path, target: Path) -> None:
    target.hardlink_to(temporary)  # fails if the target exists, in one step


def checksum_bytes(data: bytes | memoryview) -> str:
    """Checksum of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

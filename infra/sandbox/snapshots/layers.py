"""Layers of files: the content of an overlay's upper folder, as plain data that can be hashed.

A layer holds files, folders, links, removed names (the overlay's whiteouts) and opaque folders, which hide the layers
below. Folders are read without following links, because an agent may have put any link there.
"""

import contextlib
import hashlib
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path

from ostinato.infra.platform.errors import InvalidArgument

OPAQUE = "user.overlay.opaque"
_MAX_LAYER_BYTES = 1 << 30
_MAX_ENTRIES = 200_000
_MAX_DEPTH = 200
BYTES_PER_ENTRY = 1024  # kernel memory per file or folder, also for an empty one


class EntryKind(StrEnum):
    """Kinds of paths in a layer."""

    FILE = "f"
    FOLDER = "d"
    LINK = "l"
    REMOVED = "w"


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a layer. `content` is a file's bytes or a link's target."""

    kind: EntryKind
    content: bytes = b""
    mode: int = 0o644
    modified_ns: int = 0
    is_opaque: bool = False


Entries = Mapping[str, Entry]
_FOLDER_MODE = 0o755


def read_entries(folder: Path, max_bytes: int = _MAX_LAYER_BYTES) -> dict[str, Entry]:
    """Everything below a folder, by relative path, except pipes and sockets.

    Leaves out files that disappear during the read. A file without read permission gets it temporarily. Raises
    InvalidArgument if the files hold more than `max_bytes`, holes included, since holes are read too.
    """
    entries: dict[str, Entry] = {}
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _read_folder(top, "", entries, [max_bytes])
    finally:
        os.close(top)
    return entries


def write_entries(entries: Entries, folder: Path) -> None:
    """Fills an empty folder. Missing parent folders are created with default modes."""
    folder.mkdir(parents=True, exist_ok=True)
    folders: list[tuple[Path, Entry]] = []
    for path in sorted(entries):
        entry, target = entries[path], folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        match entry.kind:
            case EntryKind.FILE:
                with target.open("xb") as file:
                    file.write(entry.content)
                    os.fchmod(file.fileno(), entry.mode)
            case EntryKind.FOLDER:
                target.mkdir(exist_ok=True)
                folders.append((target, entry))
            case EntryKind.LINK:
                target.symlink_to(os.fsdecode(entry.content))
            case EntryKind.REMOVED:
                os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))
        if entry.kind is EntryKind.FILE and entry.modified_ns:
            os.utime(target, ns=(entry.modified_ns, entry.modified_ns))
    for target, entry in reversed(folders):  # inner first, before a parent's mode forbids access
        if entry.is_opaque:
            os.setxattr(target, OPAQUE, b"y")
        if entry.modified_ns:
            os.utime(target, ns=(entry.modified_ns, entry.modified_ns))
        target.chmod(entry.mode)


def identify_entries(entries: Entries) -> str:
    """Hash of everything except times, so that the same edits made later give the same layer."""
    digest = hashlib.sha256()
    for path in sorted(entries):
        entry = entries[path]
        digest.update(os.fsencode(f"{len(path)}:{path}:{entry.kind.value}{entry.mode:o}"))
        digest.update(f":{int(entry.is_opaque)}:{len(entry.content)}:".encode() + entry.content)
    return digest.hexdigest()[:32]


def fold_entries(lower: Entries, upper: Entries) -> dict[str, Entry]:
    """One layer that is equivalent to `upper` over `lower`, over any layers below both."""
    folded = dict(lower)
    for path in sorted(upper):
        entry, below = upper[path], folded.get(path)
        hides = entry.kind is not EntryKind.FOLDER or entry.is_opaque
        if hides and below is not None and below.kind is EntryKind.FOLDER:
            prefix = path + "/"
            for inner in [name for name in folded if name.startswith(prefix)]:
                del folded[inner]
        if entry.kind is EntryKind.FOLDER and not entry.is_opaque and below is not None:
            # A removed name or a file hides the layers below it, so a folder over it must hide them too.
            was_hiding = below.kind is not EntryKind.FOLDER or below.is_opaque
            entry = replace(entry, is_opaque=was_hiding)
        folded[path] = entry
    return folded


def find_writes(before: Entries, after: Entries) -> dict[str, Entry]:
    """The layer that turns `before` into `after`, ignoring times."""
    writes = {
        path: entry
        for path, entry in after.items()
        if path not in before
        or replace(entry, modified_ns=before[path].modified_ns) != before[path]
    }
    for path in before.keys() - after.keys():
        parent = after.get(path.rpartition("/")[0])
        if "/" not in path or (parent is not None and parent.kind is EntryKind.FOLDER):
            writes[path] = Entry(EntryKind.REMOVED, mode=0)
    return writes


def entries_of_files(
    files: Mapping[str, bytes | None], status_of: Callable[[str], os.stat_result | None]
) -> dict[str, Entry]:
    """A layer that writes files (None: removed) over a folder. `status_of`: status of a path in the folder (None: no
    such path). Files keep their times, which otherwise would show which files a problem changed.
    """
    entries: dict[str, Entry] = {}
    for path, content in files.items():
        parts = path.split("/")
        if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts):
            raise InvalidArgument(f"file {path!r}: wanted a relative path without . and ..")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            seen = status_of(parent)
            entries[parent] = (
                Entry(EntryKind.FOLDER, mode=seen.st_mode & 0o777, modified_ns=seen.st_mtime_ns)
                if seen is not None and stat.S_ISDIR(seen.st_mode)
                else Entry(EntryKind.FOLDER, mode=_FOLDER_MODE)
            )
        if content is None:
            entries[path] = Entry(EntryKind.REMOVED, mode=0)
        else:
            seen = status_of(path)
            modified_ns = 0 if seen is None else seen.st_mtime_ns
            entries[path] = Entry(EntryKind.FILE, content, modified_ns=modified_ns)
    return entries


def remove_folder(folder: Path) -> None:
    """Removes a folder with all its content, whatever the permissions, without following links.

    Inner folders are first moved to the top, so that folders of any depth can be removed. After an OSError, the
    rest is still below `folder`.
    """
    if not folder.is_dir():
        return
    top = os.fspath(folder)
    waiting, names = [top], (f"{top}/{secrets.token_hex(8)}-{number}" for number in count())
    while waiting:
        current = waiting.pop()
        os.chmod(current, 0o700)  # noqa: PTH101 -- paths as text for speed: every end of a box comes here
        with os.scandir(current) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # noqa: PTH101 -- otherwise it cannot be moved
                moved = entry.path if current == top else next(names)
                if moved != entry.path:
                    os.rename(entry.path, moved)  # noqa: PTH104
                waiting.append(moved)
            else:
                os.unlink(entry.path)  # noqa: PTH108
        if current != top:
            os.rmdir(current)  # noqa: PTH106
    os.rmdir(top)  # noqa: PTH106


def measure_folder(folder: Path, max_bytes: float = math.inf) -> int:
    """Bytes that the files below a folder use, kernel memory included. Files that disappear meanwhile count nothing.
    The count stops when it exceeds `max_bytes`.

    Raises InvalidArgument if the folders are nested too deep.
    """
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return 0
    try:
        return _measure(top, 0, max_bytes)
    finally:
        os.close(top)


def _measure(folder: int, depth: int, max_bytes: float) -> int:
    if depth > _MAX_DEPTH:
        raise InvalidArgument(f"folders nested deeper than {_MAX_DEPTH}")
    total = 0
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512 + BYTES_PER_ENTRY
                if total > max_bytes:
                    return total
                if entry.is_dir(follow_symlinks=False):
                    with _opened(folder, entry.name, os.O_DIRECTORY) as inner:
                        total += _measure(inner, depth + 1, max_bytes - total)
    return total


@contextlib.contextmanager
def _opened(folder: int, name: str, flags: int = 0) -> Iterator[int]:
    """A descriptor of a file or folder in a folder of a box, found through descriptors, since names may become links.

    Missing read permission is granted temporarily, which works because this process runs as the box's user; otherwise
    open files in a closed folder could grow unmeasured.
    """
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | flags, dir_fd=folder)
    place = f"/proc/self/fd/{found}"
    wanted = 0o500 if flags & os.O_DIRECTORY else 0o400
    try:
        mode = stat.S_IMODE(os.fstat(found).st_mode)
        is_closed = os.geteuid() != 0 and mode & wanted != wanted
        if is_closed:
            os.chmod(place, mode | wanted)  # noqa: PTH101 -- the path of a descriptor
        try:
            inner = os.open(place, os.O_RDONLY | os.O_NONBLOCK | flags)
            try:
                yield inner
            finally:
                os.close(inner)
        finally:
            if is_closed:
                os.chmod(place, mode)  # noqa: PTH101
    finally:
        os.close(found)


def _read_folder(folder: int, prefix: str, entries: dict[str, Entry], left: list[int]) -> None:
    """Adds a folder's content to `entries`. `left`: bytes that may still be read."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in found]
    for name in names:
        path = prefix + name
        if prefix.count("/") >= _MAX_DEPTH or len(entries) >= _MAX_ENTRIES:
            raise InvalidArgument(
                f"layer has over {_MAX_ENTRIES} entries or {_MAX_DEPTH} levels at {path[:200]!r}"
            )
        try:
            status = os.lstat(name, dir_fd=folder)
            kind = stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFREG:
                left[0] -= status.st_size
                if left[0] < 0:
                    raise InvalidArgument(f"layer is {-left[0]} bytes too large at {path[:200]!r}")
                entries[path] = _read_file(folder, name, status)
            elif kind == stat.S_IFDIR:
                with _opened(folder, name, os.O_DIRECTORY) as inner:
                    entries[path] = _folder_entry(inner, status)
                    _read_folder(inner, path + "/", entries, left)
            elif kind == stat.S_IFLNK:
                target = os.readlink(os.fsencode(name), dir_fd=folder)
                entries[path] = Entry(EntryKind.LINK, target, 0o777, status.st_mtime_ns)
            elif kind == stat.S_IFCHR and status.st_rdev == 0:
                entries[path] = Entry(EntryKind.REMOVED, mode=0)
        except FileNotFoundError:
            continue


def _read_file(folder: int, name: str, status: os.stat_result) -> Entry:
    with _opened(folder, name) as descriptor:
        parts, left = [], status.st_size
        while left > 0 and (data := os.read(descriptor, left)):
            parts.append(data)
            left -= len(data)
    # Without setuid, because a user of the host might run the copy.
    mode = stat.S_IMODE(status.st_mode) & 0o777
    return Entry(EntryKind.FILE, b"".join(parts), mode, status.st_mtime_ns)


def _folder_entry(descriptor: int, status: os.stat_result) -> Entry:
    names = os.listxattr(descriptor)
    is_opaque = OPAQUE in names and os.getxattr(descriptor, OPAQUE) == b"y"
    mode = stat.S_IMODE(status.st_mode) & 0o1777
    return Entry(EntryKind.FOLDER, b"", mode, status.st_mtime_ns, is_opaque)

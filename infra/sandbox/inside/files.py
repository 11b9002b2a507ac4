"""Files of a box as its server reads and changes them for the host: below /repo, /tmp and /dev/shm.

The check of where an opened file really lies (links, `..` and /proc tricks end there), atomic
writes with a precondition, and the packed form of file statuses. Errors are OSError or `Refused`.
Standard library only: this file runs inside the box.
"""

import contextlib
import os
import stat
import struct

from ostinato.infra.sandbox.inside.tree import remove_tree

ROOT = "/repo"
ROOTS = (ROOT, "/tmp", "/dev/shm")
MAX_READ_BYTES = 8 << 20
MAX_ENTRIES = 20_000
STATUS = struct.Struct(">cBQqI")  # kind, executable, bytes, modified, length of the path
_KINDS = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}


class Refused(Exception):
    """A request that the server answers with an error of a kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def resolve(path: str) -> str:
    """The absolute path; relative ones begin at the repository."""
    return os.path.normpath(os.path.join(ROOT, path))


def read_part(path: str, offset_bytes: int, max_bytes: int) -> bytes:
    """Bytes of a regular file; `max_bytes` -1: all of it."""
    descriptor = _open_below(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise Refused("invalid", f"{path} is a folder, wanted a file")
        if not stat.S_ISREG(status.st_mode):
            raise Refused("invalid", f"{path} is not a regular file")
        wanted = status.st_size - offset_bytes if max_bytes < 0 else max_bytes
        if wanted > MAX_READ_BYTES:
            raise Refused("output_limit", f"{path}: {wanted} bytes, at most {MAX_READ_BYTES}")
        parts, place = [], offset_bytes
        while wanted > 0 and (data := os.pread(descriptor, wanted, place)):
            parts.append(data)
            place += len(data)
            wanted -= len(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def write_whole(path: str, content: bytes, expected: str, is_executable: bool) -> None:
    """Replace a file at once. `expected`: hex SHA-256 of what is there now, - for nothing, * any."""
    full = resolve(path)
    if not os.path.basename(full) or full in ROOTS:
        raise Refused("invalid", f"{path} is a folder, wanted a file")
    _refuse_outside(full, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    folder = _open_below(os.path.dirname(full), os.O_DIRECTORY)
    try:
        _check_expected(path, expected)
        name = os.path.basename(full)
        partial = f".{name[:200]}.partial"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=folder)
        mode = 0o755 if is_executable or _was_executable(full) else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = os.open(partial, flags, mode, dir_fd=folder)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(target, view) :]
            os.fchmod(target, mode)
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(partial, dir_fd=folder)
            raise
        finally:
            os.close(target)
    finally:
        os.close(folder)


def list_below(path: str, max_depth: int) -> list[bytes]:
    """Packed statuses of what is in a folder, and in its folders, by path."""
    os.close(_open_below(path, os.O_DIRECTORY))
    top = resolve(path)
    packed: list[bytes] = []
    folders = [("", 1)]
    for folder, depth in folders:
        try:
            entries = list(os.scandir(os.path.join(top, folder)))
        except PermissionError:
            continue
        for entry in entries:
            if len(packed) >= MAX_ENTRIES:
                raise Refused("output_limit", f"{path} holds more than {MAX_ENTRIES} entries")
            below = os.path.join(folder, entry.name)
            packed.append(_pack(below, entry.stat(follow_symlinks=False)))
            if depth < max_depth and entry.is_dir(follow_symlinks=False):
                folders.append((below, depth + 1))
    return packed


def status_of(path: str) -> bytes:
    """Packed status of a path; empty when nothing is there."""
    full = resolve(path)
    _refuse_outside(full, path)
    try:
        if full not in ROOTS:
            os.close(_open_below(os.path.dirname(full), os.O_DIRECTORY))
        return _pack(path, os.lstat(full))
    except (FileNotFoundError, NotADirectoryError):
        return b""


def remove(path: str) -> None:
    """Remove a file or link, or a folder with all below it."""
    full = resolve(path)
    _refuse_outside(full, path)
    if full in ROOTS:
        raise Refused("invalid", f"{path} itself is not removed, only what is in it")
    os.close(_open_below(os.path.dirname(full), os.O_DIRECTORY))
    if stat.S_ISDIR(os.lstat(full).st_mode):
        remove_tree(full)
    else:
        os.unlink(full)


def _open_below(path: str, flags: int) -> int:
    """Open a path that, with all links followed, lies below the roots.

    The check is on the opened file, so nobody can swap a link in between.
    """
    full = resolve(path)
    descriptor = os.open(full, flags | os.O_NONBLOCK | os.O_NOCTTY)
    real = os.readlink(f"/proc/self/fd/{descriptor}")
    if not _is_below_roots(real):
        os.close(descriptor)
        raise Refused("invalid", f"{path} is outside the repository and /tmp")
    return descriptor


def _refuse_outside(full: str, path: str) -> None:
    if not _is_below_roots(full):
        raise Refused("invalid", f"{path} is outside the repository and /tmp")


def _is_below_roots(path: str) -> bool:
    return any(path == root or path.startswith(root + "/") for root in ROOTS)


def _check_expected(path: str, expected: str) -> None:
    if expected == "*":
        return
    try:
        content: bytes | None = read_part(path, 0, -1)
    except FileNotFoundError:
        content = None
    if expected == "-":
        if content is not None:
            raise Refused("precondition", f"{path} exists, wanted no such file")
        return
    import hashlib  # noqa: PLC0415 -- few writes need it and it would lengthen every start

    seen = "no file" if content is None else hashlib.sha256(content).hexdigest()
    if seen != expected:
        raise Refused("precondition", f"{path} has content {seen}, wanted {expected}")


def _was_executable(full: str) -> bool:
    try:
        status = os.lstat(full)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o100)


def _pack(path: str, status: os.stat_result) -> bytes:
    name = os.fsencode(path)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), b"o")
    executable = 1 if status.st_mode & 0o100 else 0
    return STATUS.pack(kind, executable, status.st_size, status.st_mtime_ns, len(name)) + name

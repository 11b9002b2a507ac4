"""Copies, in memory, of all that boxes see of the host's files.

Whoever reads a file on a disk leaves it in the kernel's cache, and whoever reads it next feels that: a box could tell it
to one made after it. The files of a memory filesystem are always there, so nothing is left to tell. Where there is
none with room the copies lie in the temporary folder, and the host's own programs stay where they are.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ostinato.infra.platform.errors import SandboxError

_FORMAT = "4"  # part of every key: raise it when what is prepared changes
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 2 << 30  # that must be free there
_MOST_BYTES = 1 << 30  # of one folder; a larger one stays where it is
_LARGEST_BYTES = 8 << 20  # of a program or library of the host; boxes are without larger ones
_NOT_COPIED = (".a", ".la", ".o")  # for linkers
_held: dict[Path, int] = {}  # descriptors whose locks tell other processes that a copy is in use


def cache_root() -> Path:
    """This user's folder for prepared parts on disk: made when needed, closed to others."""
    return _own_folder(Path(tempfile.gettempdir()))


@functools.cache
def memory_root() -> Path | None:
    """This user's folder in memory, like `cache_root`. None: there is no memory filesystem with room."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        space = os.statvfs(_MEMORY)
        has_room = space.f_bavail * space.f_frsize >= _ROOM_BYTES
        if [str(_MEMORY), "tmpfs"] in mounts and has_room and os.access(_MEMORY, os.W_OK):
            return _own_folder(_MEMORY)
    return None


def key_of(*parts: str) -> str:
    """A short hash of all that a prepared folder is made of."""
    return hashlib.sha256(json.dumps([_FORMAT, *parts]).encode()).hexdigest()[:16]


def prepare(name: str, key: str, fill: Callable[[Path], None]) -> Path:
    """The folder of a key, kept while this process lives. `fill(path)` makes it when it is not there. Folders of the
    same name that no process keeps are removed.
    """
    root = memory_root() or cache_root()
    target = root / f"{name}-{key}"
    while target not in _held or not target.is_dir():
        if not target.is_dir():
            _make(target, fill)
        with contextlib.suppress(FileNotFoundError):  # removed by another process: again
            _held[target] = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(_held[target], fcntl.LOCK_SH)
    return target


def copy_programs(folder: Path) -> Path:
    """A folder of the host's programs or libraries in memory, or itself where it cannot be there."""
    return _copy("host", folder, _LARGEST_BYTES, lambda name: name.endswith(_NOT_COPIED))


def copy_repository(folder: Path, is_left_out: Callable[[str], bool]) -> Path:
    """A repository in memory without the names left out, or itself where it cannot be there."""
    return _copy("repository", folder, _MOST_BYTES, is_left_out)


def _copy(name: str, folder: Path, most_bytes: int, is_left_out: Callable[[str], bool]) -> Path:
    if memory_root() is None:
        return folder
    found = sorted(_files(folder, is_left_out))
    if sum(size for _, size, _ in found if size <= most_bytes) > _MOST_BYTES:
        return folder

    def fill(target: Path) -> None:
        def copy(source: str, place: str) -> None:
            with contextlib.suppress(PermissionError):
                if Path(source).stat().st_size <= most_bytes:
                    shutil.copy2(source, place)

        left_out = lambda _, names: [name for name in names if is_left_out(name)]  # noqa: E731
        shutil.copytree(
            folder, target, symlinks=True, ignore=left_out, copy_function=copy, dirs_exist_ok=True
        )

    label = f"{name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"
    return prepare(label, key_of(json.dumps(found)), fill)


def _files(folder: Path, is_left_out: Callable[[str], bool]) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of change of every file."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_left_out(name)]
        for name in names:
            if not is_left_out(name):
                status = Path(parent, name).lstat()
                yield f"{parent}/{name}", status.st_size, status.st_mtime_ns


def _make(target: Path, fill: Callable[[Path], None]) -> None:
    name = target.name.rpartition("-")[0]
    for old in target.parent.glob(f"{name}-" + "[0-9a-f]" * 16):
        _remove_unused(old)
    partial = Path(tempfile.mkdtemp(prefix=f"partial-{name}-", dir=target.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _own_folder(parent: Path) -> Path:
    root = parent / f"ostinato-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SandboxError(
            f"{root} has owner {status.st_uid} and mode {status.st_mode & 0o777:o}, wanted "
            f"{os.geteuid()} and 700; remove it"
        )
    return root

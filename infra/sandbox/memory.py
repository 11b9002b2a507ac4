"""Copies, in memory, of the host's files that boxes see.

Reading a file from disk leaves it in the kernel's page cache, and the next reader can measure that: one box could signal
to a later one. Files of a memory filesystem are always in memory, so they carry no such signal. Without a memory
filesystem with enough free space, prepared folders are on disk, and programs and repositories are not copied.
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

_FORMAT = "4"  # part of every key; raise it when the content of prepared folders changes
_MEMORY = Path("/dev/shm")
_MIN_FREE_BYTES = 2 << 30  # free space that the memory filesystem must have
_MAX_FOLDER_BYTES = 1 << 30  # a larger folder is not copied
_MAX_PROGRAM_BYTES = 8 << 20  # larger programs and libraries of the host are left out of boxes
_NOT_COPIED = (".a", ".la", ".o")  # for linkers
_locks: dict[Path, int] = {}  # descriptors with a shared lock on each copy that this process uses


def cache_root() -> Path:
    """This user's folder for prepared files on disk, created when needed and closed to other users."""
    return _own_folder(Path(tempfile.gettempdir()))


@functools.cache
def memory_root() -> Path | None:
    """Like `cache_root`, in memory. None: no writable memory filesystem with enough free space."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        space = os.statvfs(_MEMORY)
        has_space = space.f_bavail * space.f_frsize >= _MIN_FREE_BYTES
        if [str(_MEMORY), "tmpfs"] in mounts and has_space and os.access(_MEMORY, os.W_OK):
            return _own_folder(_MEMORY)
    return None


def key_of(*parts: str) -> str:
    """A short hash of the inputs of a prepared folder."""
    return hashlib.sha256(json.dumps([_FORMAT, *parts]).encode()).hexdigest()[:16]


def prepare(name: str, key: str, fill: Callable[[Path], None]) -> Path:
    """The folder of a key, locked while this process lives. `fill(path)` fills a missing one, after folders of the
    same name that no process uses are removed.
    """
    root = memory_root() or cache_root()
    target = root / f"{name}-{key}"
    while target not in _locks or not target.is_dir():
        if not target.is_dir():
            _make(target, fill)
        with contextlib.suppress(FileNotFoundError):  # another process removed it: try again
            _locks[target] = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(_locks[target], fcntl.LOCK_SH)
    return target


def copy_programs(folder: Path) -> Path:
    """A copy in memory of a folder of the host's programs or libraries, or the folder itself if it does not fit."""
    return _copy("host", folder, _MAX_PROGRAM_BYTES, lambda name: name.endswith(_NOT_COPIED))


def copy_repository(folder: Path, is_left_out: Callable[[str], bool]) -> Path:
    """A copy in memory of a repository without the names left out, or the folder itself if it does not fit."""
    return _copy("repository", folder, _MAX_FOLDER_BYTES, is_left_out)


def _copy(name: str, folder: Path, max_bytes: int, is_left_out: Callable[[str], bool]) -> Path:
    """`max_bytes`: size of the largest file that is copied."""
    if memory_root() is None:
        return folder
    found = sorted(_files(folder, is_left_out))
    if sum(size for _, size, _ in found if size <= max_bytes) > _MAX_FOLDER_BYTES:
        return folder

    def fill(target: Path) -> None:
        def copy(source: str, place: str) -> None:
            with contextlib.suppress(PermissionError):
                if Path(source).stat().st_size <= max_bytes:
                    shutil.copy2(source, place)

        left_out = lambda _, names: [name for name in names if is_left_out(name)]  # noqa: E731
        shutil.copytree(
            folder, target, symlinks=True, ignore=left_out, copy_function=copy, dirs_exist_ok=True
        )

    label = f"{name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"
    return prepare(label, key_of(json.dumps(found)), fill)


def _files(folder: Path, is_left_out: Callable[[str], bool]) -> Iterator[tuple[str, int, int]]:
    """Path, size and modification time of every file."""
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

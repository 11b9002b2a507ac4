"""Folders as mappings from the relative path of each regular file to its content, and locks on files."""

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from filelock import FileLock

from ostinato.infra.platform.errors import ProblemError

# a name that is too long, or of a file where another path needs a folder
_NAME_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


def list_files(folder: Path, enters: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """Relative path and bytes of each regular file; -1 bytes for entries that cannot be read. Links are not followed.
    `enters` decides by its relative path whether a folder is listed. Folders may be nested deeper than Python's stack.
    """
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            entries = list(os.scandir(folder / inside))
        except OSError:
            yield inside, -1
            continue
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError:  # removed meanwhile
                yield path, -1
                continue
            if stat.S_ISREG(seen.st_mode):
                yield path, seen.st_size
            elif stat.S_ISDIR(seen.st_mode) and enters(path):
                waiting.append(path)


def read_folder(
    folder: Path, *, left_out: Collection[str] = (), most_bytes: int | None = None
) -> dict[str, bytes]:
    """Regular files below a folder, without links, files and folders named in `left_out`, and files of more than
    `most_bytes`.
    """

    def is_wanted(path: str) -> bool:
        return path.rpartition("/")[2] not in left_out

    return {
        path: (folder / path).read_bytes()
        for path, size in sorted(list_files(folder, is_wanted), key=lambda item: item[0].split("/"))
        if path and is_wanted(path) and (most_bytes is None or size <= most_bytes)
    }


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files below a folder and creates missing folders. ProblemError for a path that leaves the folder, before
    any file is written, and for a name that no file can have.
    """
    for path in files:
        if not stays_below(path):
            raise ProblemError(f"file {path!r} of {folder}, wanted a path below it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        place = folder / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        except (OSError, ValueError) as error:  # ValueError: a zero byte
            if isinstance(error, OSError) and error.errno not in _NAME_ERRORS:
                raise
            why = error.strerror if isinstance(error, OSError) else error
            raise ProblemError(f"file {path[:80]!r} of {folder} cannot be written: {why}") from None


def locked(path: Path) -> FileLock:
    """The lock of a file, to be held during a block: one thread of one process at a time, whose forked children do not
    hold it. The kernel releases it however the process ends. Creates the file's folder when needed.
    """
    # where flock is missing: an error, not a lock that outlives its process
    return FileLock(path, fallback_to_soft=False)


def stays_below(path: str) -> bool:
    """Whether a relative path leads to no place outside of its folder."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is one of the roots or lies in one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)

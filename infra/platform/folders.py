"""Folders as mappings from the relative path of each regular file to its content."""

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path


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
    """Writes files below a folder and creates missing folders."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is one of the roots or lies in one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)

"""Flushes of files and folders, so that a loss of power loses neither their bytes nor their names."""

import errno
import os
import shutil
from pathlib import Path

_ASIDE = "-replaced"


def place_folder(temporary: Path, final: Path) -> None:
    """Flushes a finished folder, renames it and flushes the new name. A replaced folder is kept
    under another name until then, so that `put_back` can restore it after a kill.
    """
    for directory, _, names in os.walk(temporary):
        for name in names:
            flush(Path(directory, name))
        flush(Path(directory))
    aside = _aside(final)
    while True:
        try:
            temporary.replace(final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # in a loop, since a reader may just have put the old one back
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(final: Path) -> None:
    """Restores the name of a folder if a kill came before its replacement got the name."""
    if not final.exists() and _aside(final).is_dir():
        _aside(final).rename(final)


def put_all_back(parent: Path) -> None:
    """Calls `put_back` for all folders in `parent`."""
    for aside in parent.glob(f".*{_ASIDE}"):
        put_back(parent / aside.name.removeprefix(".").removesuffix(_ASIDE))


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}{_ASIDE}")


def make_parents(folder: Path) -> None:
    """Makes the parents of a folder and flushes their names."""
    present = next(parent for parent in folder.parents if parent.is_dir())
    folder.parent.mkdir(parents=True, exist_ok=True)
    for parent in folder.parents:
        flush(parent)
        if parent == present:
            break


def flush(path: Path) -> None:
    """Flushes the bytes of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

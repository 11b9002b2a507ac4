"""Flushes of files and folders, after which a loss of power loses neither their bytes nor their names."""

import errno
import os
import shutil
from pathlib import Path

_ASIDE = "-replaced"


def place_folder(temporary: Path, final: Path) -> None:
    """Flushes a finished folder, renames it and flushes the new name. A folder that it replaces lies
    beside it until then, where `put_back` finds it after a kill.
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
        # again where a reader put the old one back just now
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(final: Path) -> None:
    """Gives a folder its name back if a kill came before the one that was to replace it had the name."""
    if not final.exists() and _aside(final).is_dir():
        _aside(final).rename(final)


def put_all_back(parent: Path) -> None:
    """The same for all folders in one."""
    for aside in parent.glob(f".*{_ASIDE}"):
        put_back(parent / aside.name.removeprefix(".").removesuffix(_ASIDE))


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}{_ASIDE}")


def make_parents(folder: Path) -> None:
    """Makes the folders above one and flushes their names."""
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

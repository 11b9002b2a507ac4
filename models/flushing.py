"""Flushes of files and folders, after which a loss of power loses neither their bytes nor their names."""

import os
from pathlib import Path


def place_folder(temporary: Path, final: Path) -> None:
    """Flushes a finished folder, renames it and flushes the new name."""
    for directory, _, names in os.walk(temporary):
        for name in names:
            flush(Path(directory, name))
        flush(Path(directory))
    temporary.replace(final)
    flush(final.parent)


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

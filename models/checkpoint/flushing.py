"""Files that outlast a loss of power: their bytes and names are flushed before a folder gets its name."""

import os
from pathlib import Path


def place_folder(temporary: Path, final: Path) -> None:
    """Flushes all of a finished folder, then gives it its name, which outlasts a loss of power too."""
    for directory, _, names in os.walk(temporary):
        for name in names:
            _flush(Path(directory, name))
        _flush(Path(directory))
    temporary.replace(final)
    _flush(final.parent)


def make_parents(folder: Path) -> None:
    """Makes the folders above one, with names that outlast a loss of power."""
    present = next(parent for parent in folder.parents if parent.is_dir())
    folder.parent.mkdir(parents=True, exist_ok=True)
    for parent in folder.parents:
        _flush(parent)
        if parent == present:
            break


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

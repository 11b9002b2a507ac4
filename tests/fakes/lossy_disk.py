"""A disk that loses power: of each file and folder it keeps what was flushed, and nothing else.

It is the worst that POSIX allows. A file keeps the bytes of its last fsync, a folder the names of its own last fsync;
a name whose file was never flushed leads to an empty one.
"""

import os
import stat
from pathlib import Path

import pytest


class PowerLost(Exception):
    """Raised by the flush during which power is lost, and by all that follow."""


class LossyDisk:
    """What a folder holds after a loss of power. It looks at `os.fsync`, which it replaces."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, flushes: int | None = None) -> None:
        """`flushes`: how many succeed before power is lost. None: all."""
        self._root = root
        self._left = flushes
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, tuple[int, bool]]] = {}  # name -> inode, whether folder
        self._held: list[int] = []  # open, so that no number of an inode is used again
        self._flush = os.fsync
        self.flushes = 0
        self._note(os.open(root, os.O_RDONLY))
        patch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        """Keeps what is open there now."""
        if self._left is not None and self.flushes >= self._left:
            raise PowerLost
        self.flushes += 1
        self._flush(descriptor)
        self._note(os.dup(descriptor))

    def _note(self, descriptor: int) -> None:
        self._held.append(descriptor)
        place = f"/proc/self/fd/{descriptor}"
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(place) as entries:
                self._folders[found.st_ino] = {
                    entry.name: (entry.inode(), entry.is_dir()) for entry in entries
                }
        else:
            self._files[found.st_ino] = Path(place).read_bytes()

    def restore(self, target: Path) -> Path:
        """The folder as it is found after the loss, at another place."""
        self._restore(self._root.stat().st_ino, target)
        for descriptor in self._held:
            os.close(descriptor)
        return target

    def _restore(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (inner, is_folder) in self._folders.get(inode, {}).items():
            if is_folder:
                self._restore(inner, target / name)
            else:
                (target / name).write_bytes(self._files.get(inner, b""))

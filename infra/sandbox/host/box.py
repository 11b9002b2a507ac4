"""One bubblewrap box and its process: the only place that knows bubblewrap's flags.

A box has no network, no capabilities, no host paths except those of system.py, and none of the system calls that
system_calls.py refuses. Only /repo, /tmp, /run and /dev/shm are writable, and each has a size limit. /proc and the
devices belong to the host, so not even their modes and times can be changed (starter.c).
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted, OutOfMemory, SandboxError, SandboxLost
from ostinato.infra.sandbox.host.mounts import find_bubblewrap
from ostinato.infra.sandbox.host.system import (
    AGENT,
    LIBRARY,
    PYTHON,
    SEARCH_PATH,
    SITE,
    VARIABLES,
    build_starter,
    devices_folder,
    system_mounts,
)
from ostinato.infra.sandbox.host.system_calls import filter_program
from ostinato.infra.sandbox.inside.apart import HOST_PROC
from ostinato.infra.sandbox.protocol import SandboxLimits

_ROOT = Path("/sys/fs/cgroup")
_GROUP = "ostinato"
# cgroup v1 limits of memory with swap and of socket buffers, set where the kernel has them
_VERSION_1_MEMORY = ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
# groups that still had ending processes when their box was closed
_closing: set[Path] = set()

logger = logging.getLogger(__name__)
REPOSITORY_PATH = "/repo"
_END_SECONDS = 60.0  # long, because a process ends only when the kernel has freed the box's memory
_IN_MEMORY = ("/tmp", "/run", "/dev/shm")  # writable folders
_OPEN_FILES = 4096  # per process
_SIGNALS = 1024  # pending signals of all processes of a box; timers count too
_counter = itertools.count()
_CAPACITY_ERRORS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Docker's default profiles refuse namespaces and mounts, and a box cannot mount its own /proc while parts
# of the container's /proc are masked
CONTAINER_OPTIONS = ("seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined")
HOW_TO_ALLOW_BOXES = (
    "allow user namespaces with `sysctl -w user.max_user_namespaces=15000` (on Debian also `sysctl -w "
    "kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`), and run a container with "
    f"`{' '.join(f'--security-opt {option}' for option in CONTAINER_OPTIONS)}`"
)
_NO_NAMESPACES = f"bubblewrap could not make the box; {HOW_TO_ALLOW_BOXES}"


class BoxProcess:
    """A running box. `socket` is connected to its process 1. Closing the box ends every process inside.

    `admit` sets the limits of the box. It must be called before the first request; until then only the
    server's own code runs inside.
    """

    def __init__(
        self,
        limits: SandboxLimits,
        repository_mounts: tuple[str, ...],
        *,
        server: str | None = None,
        tests_may_write: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts process 1: the agent, or the Python module `server` below infra/sandbox/inside.

        `repository_mounts`: bubblewrap's arguments for /repo. `tests_may_write`: as for TestServer. The calling thread
        must outlive the box.
        """
        # These calls fail where something is missing on the host, so they come before anything is opened.
        starter = [str(build_starter()), str(devices_folder()), *_isolation(limits)]
        rights = () if server is None else _NAMESPACE_RIGHTS
        rights += _OVERLAY_RIGHTS if tests_may_write else ()
        mounts = (*system_mounts(), *repository_mounts, *rights, *_READ_ONLY)
        variables = _variables({**_ENVIRONMENT, **(environment or {})})
        allowed = filter_program()
        self.name = f"{os.getpid()}-{next(_counter)}"
        self.process_id: int | None = None  # of process 1, in the host's pid namespace
        self._first = -1  # pidfd of process 1, whose end ends all others
        self._limits = limits
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as handed_over:
            try:
                self.socket, box_socket = socket.socketpair()
                undo.callback(self.socket.close)
                handed_over.callback(box_socket.close)
                self.information_pipe, information_end = os.pipe()
                undo.callback(os.close, self.information_pipe)
                handed_over.callback(os.close, information_end)
                filter_end, filter_source = os.pipe()
                handed_over.callback(os.close, filter_end)
                os.write(filter_source, allowed)  # far less than a pipe holds
                os.close(filter_source)
                self._group = ControlGroup(self.name, limits)
                undo.callback(self._group.remove)
                self._process = subprocess.Popen(
                    [
                        *(*starter, *mounts, *variables, "--info-fd", str(information_end)),
                        *("--chdir", REPOSITORY_PATH),
                        *_start_server(server, box_socket.fileno(), filter_end),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(box_socket.fileno(), information_end, filter_end),
                    env={},
                    process_group=0,  # Ctrl-C in a terminal must reach the host program only
                )
            except OSError as error:
                if error.errno in _CAPACITY_ERRORS:
                    raise CapacityExhausted(f"no resources for box {self.name}: {error}") from error
                raise SandboxError(
                    f"bubblewrap cannot be started ({starter[0]}): {error}"
                ) from error
            undo.pop_all()

    def admit(self) -> None:
        """Puts process 1, and so all that it starts later, under the limits. Blocks until bubblewrap has made it.

        If bubblewrap failed, this does nothing: the socket is then closed, and `explain_death` gives the reason.
        """
        process_id = self._find_first_process()
        if process_id is None:
            return
        try:
            for limit, wanted in (
                (resource.RLIMIT_FSIZE, self._limits.file_bytes),
                (resource.RLIMIT_CORE, 0),
                # otherwise the host's own limit is inherited, which may be very high
                (resource.RLIMIT_NOFILE, _OPEN_FILES),
                (resource.RLIMIT_SIGPENDING, _SIGNALS),
            ):
                _, hard = resource.prlimit(process_id, limit)
                wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.prlimit(process_id, limit, (wanted, wanted))
            self._group.add(process_id)
        except ProcessLookupError:
            return
        self.process_id = process_id

    def explain_death(self) -> SandboxError:
        """The reason why the box ended, to be asked for only after its socket closed.

        SandboxLost; OutOfMemory if the code inside caused it; SandboxError with the fix if the kernel refuses
        boxes.
        """
        self.kill()
        self._process.wait()
        assert self._process.stderr is not None
        message = self._process.stderr.read().decode(errors="replace").strip()
        code = self._process.returncode
        text = f"box {self.name} ended with code {code}: {message[-800:] or 'no message'}"
        if self._group.count_memory_kills():
            return OutOfMemory(f"{text}; it exceeded its memory limit")
        if message.startswith("bwrap:"):
            return SandboxError(f"{text}; {_NO_NAMESPACES}")
        return SandboxLost(text)

    def kill(self) -> None:
        """Ends everything inside. `close` must still free the rest."""
        if self._process.poll() is None:  # the group, as a new child may not yet die with it
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Ends the box without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends the box. Blocks until none of its processes runs."""
        self.socket.close()
        self.kill()
        self._process.wait()
        if self.information_pipe >= 0:  # never admitted, but process 1 may exist
            self._find_first_process()
        first, self._first = self._first, -1
        if first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            end = select.poll()
            end.register(first, select.POLLIN)
            if not end.poll(_END_SECONDS * 1000):
                logger.error("box %s did not end within %.0f s", self.name, _END_SECONDS)
            os.close(first)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._group.remove()

    def count_entries_in_memory(self) -> int:
        """Number of files and folders, also empty ones, in the box's in-memory folders."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            places = [Path(f"/proc/{self.process_id}/root{path}") for path in _IN_MEMORY]
            host = {path.stat().st_dev for path in map(Path, _IN_MEMORY) if path.exists()}
            if host & {place.stat().st_dev for place in places}:
                return 0  # process 1 has not left the host's root yet
            seen = [os.statvfs(place) for place in places]
            return sum(status.f_files - status.f_ffree for status in seen)
        return 0

    def _find_first_process(self) -> int | None:
        """Id of process 1. None: bubblewrap did not start it, or it has ended."""
        with os.fdopen(self.information_pipe, "rb") as pipe:
            information = pipe.read()
        self.information_pipe = -1
        if not information:
            return None
        process_id = int(json.loads(information)["child-pid"])
        try:
            self._first = os.pidfd_open(process_id)
        except ProcessLookupError:
            return None
        return process_id


def _start_server(server: str | None, descriptor: int, filter_end: int) -> tuple[str, ...]:
    if server is None:
        return ("--seccomp", str(filter_end), "--", AGENT, str(descriptor))
    start = f"from ostinato.infra.sandbox.inside.{server} import main"
    # Not -I, which ignores PYTHONHASHSEED: hash order must be the same in every box.
    switches = ("-s", "-S", "-P", "-B", "-X", "utf8", "-c")
    text = f"import sys; sys.path.insert(0, '{LIBRARY}'); {start}; main({descriptor}, {filter_end})"
    return ("--", f"{PYTHON}/bin/python3", *switches, text)


def _isolation(limits: SandboxLimits) -> list[str]:
    """Bubblewrap, with arguments for namespaces, identity and the writable in-memory folders."""
    return [
        str(find_bubblewrap()),
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--as-pid-1", "--hostname", "box", "--proc", "/proc", "--dev", "/dev"),
        *(
            word
            for path in _IN_MEMORY
            for word in ("--size", str(limits.writable_bytes), "--tmpfs", path)
        ),
    ]


# For a server that creates namespaces for its runs (inside/apart.py): rights in the box's user namespace, and an
# unmasked /proc, without which the kernel refuses to mount another. The server hides it from the runs.
_NAMESPACE_RIGHTS = (
    *("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_NET_ADMIN"),
    *("--ro-bind", "/proc", HOST_PROC),
)
_OVERLAY_RIGHTS = ("--cap-add", "CAP_DAC_OVERRIDE")  # an overlay's working folder has mode 0
_READ_ONLY = ("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/")


def python_path(import_roots: Iterable[str], *others: str) -> str:
    """The variable PYTHONPATH of a box: folders of the repository, then `others`."""
    return ":".join((*(f"{REPOSITORY_PATH}/{root}" for root in import_roots), *others))


def _variables(environment: dict[str, str]) -> list[str]:
    arguments = ["--clearenv"]
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    return arguments


_ENVIRONMENT = {
    **VARIABLES,
    "PATH": SEARCH_PATH,
    "PYTHONPATH": SITE,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
}


class ControlGroup:
    """Control groups of one box. Has no effect where the host does not allow creating them."""

    def __init__(self, name: str, limits: SandboxLimits) -> None:
        """`name` begins with this process's id and a dash, so that groups of dead processes can be found and removed."""
        _sweep_dead()
        self._directories: list[Path] = []
        memory, processes = str(limits.memory_bytes), {"pids.max": str(limits.processes)}
        if (_ROOT / "cgroup.controllers").exists():  # version 2
            values = {"memory.max": memory, "memory.swap.max": "0", **processes}
            self._make(_ROOT / _GROUP, name, values)
        else:
            self._make(_ROOT / "memory" / _GROUP, name, {"memory.limit_in_bytes": memory})
            self._make(_ROOT / "pids" / _GROUP, name, processes)

    def add(self, process_id: int) -> None:
        """Adds a process, and so everything that it starts later."""
        for directory in self._directories:
            (directory / "cgroup.procs").write_text(str(process_id))

    def count_memory_kills(self) -> int:
        """Number of processes of the group that the kernel's OOM killer ended."""
        files = ("memory.events", "memory.oom_control")
        return sum(
            _read_field(directory / name, "oom_kill")
            for directory in self._directories
            for name in files
        )

    def remove(self) -> None:
        """Removes the groups. One that still holds a process is removed at a later call, of any box."""
        _closing.update(self._directories)
        self._directories.clear()
        for directory in list(_closing):
            if _remove_group(directory):
                _closing.discard(directory)

    def _make(self, parent: Path, name: str, values: dict[str, str]) -> None:
        directory = parent / name
        try:
            directory.mkdir(parents=True)
            for key, value in values.items():
                (directory / key).write_text(value)
            for key in _VERSION_1_MEMORY if "memory.limit_in_bytes" in values else ():
                if (directory / key).exists():
                    (directory / key).write_text(values["memory.limit_in_bytes"])
        except OSError:
            _remove_group(directory)
        else:
            self._directories.append(directory)


@functools.cache
def _sweep_dead() -> None:
    """Removes, once per process, the groups of processes that were killed."""
    for parent in (
        _ROOT / _GROUP,
        *(_ROOT / name / _GROUP for name in ("memory", "pids")),
    ):
        if parent.is_dir():
            for directory in parent.iterdir():
                owner = directory.name.partition("-")[0]
                if directory.is_dir() and owner.isdigit() and not Path(f"/proc/{owner}").exists():
                    _remove_group(directory)


def _read_field(file: Path, name: str) -> int:
    """The number after a name in a file of `name number` lines. 0 if the file or the name is missing."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _remove_group(directory: Path) -> bool:
    """Whether the group is gone now."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

"""One bubblewrap box and its process: the only place that knows bubblewrap's flags.

A box has no network, no capabilities, no host path but those of system.py, and none of the system calls that
system_calls.py refuses. Only /repo, /tmp, /run and /dev/shm can be written, and each has a size. Of /proc and of the
devices, which are the host's own, not even modes and times can be changed (starter.c).
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
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.errors import CapacityExhausted, OutOfMemory, SandboxError, SandboxLost
from ostinato.infra.sandbox.host.mounts import find_bubblewrap
from ostinato.infra.sandbox.host.system import (
    AGENT,
    LIBRARY,
    PROGRAMS,
    PYTHON,
    SITE,
    VARIABLES,
    build_starter,
    devices_folder,
    system_mounts,
)
from ostinato.infra.sandbox.host.system_calls import filter_program
from ostinato.infra.sandbox.inside.apart import HIDDEN
from ostinato.infra.sandbox.protocol import SandboxLimits

_ROOT = Path("/sys/fs/cgroup")
_GROUP = "ostinato"
# limits of memory with swap, and of socket buffers, where the kernel has them
_VERSION_1_TOO = ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
# groups whose last processes had not quite ended when their box was closed
_closing: set[Path] = set()

logger = logging.getLogger(__name__)
REPOSITORY_PATH = "/repo"
_END_SECONDS = 60.0  # the kernel frees a box's memory before its processes have ended
_IN_MEMORY = ("/tmp", "/run", "/dev/shm")  # can be written
_OPEN_FILES = 4096  # of one process
_SIGNALS = 1024  # pending ones of all processes of a box; timers count too
_counter = itertools.count()
_NO_ROOM = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Docker's default profiles refuse namespaces and mounts, and a box cannot mount a /proc of its own while
# parts of the container's are masked
CONTAINER_OPTIONS = ("seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined")
HOW_TO_ALLOW_BOXES = (
    "allow user namespaces with `sysctl -w user.max_user_namespaces=15000` (on Debian also `sysctl -w "
    "kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`), and run a container with "
    f"`{' '.join(f'--security-opt {option}' for option in CONTAINER_OPTIONS)}`"
)
_NO_NAMESPACES = f"bubblewrap could not make the box; {HOW_TO_ALLOW_BOXES}"


class BoxProcess:
    """A running box. `socket` talks to its process 1. Closing it ends every process inside.

    What limits the box is set by `admit`, which must come before the first request: until then no
    code runs inside but the server's own.
    """

    def __init__(
        self,
        limits: SandboxLimits,
        repository_mounts: tuple[str, ...],
        *,
        server: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start process 1: the agent, or the Python module `server` below infra/sandbox/inside.

        `repository_mounts`: bubblewrap's arguments for /repo. The calling thread must outlive the
        box.
        """
        # what may be missing is looked for before anything is opened
        starter = [str(build_starter()), str(devices_folder()), *_isolation(limits)]
        own = () if server is None else _RUN_MAKER
        mounts = (*system_mounts(), *repository_mounts, *own, *_read_only("/proc", "/dev", "/"))
        variables = _variables({**_ENVIRONMENT, **(environment or {})})
        allowed = filter_program()
        self.name = f"{os.getpid()}-{next(_counter)}"
        self.process_id: int | None = None  # of process 1, as this host counts
        self._first = -1  # a descriptor of process 1, with which all others end
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
                    process_group=0,  # Ctrl-C in a terminal is for the host program, not for its boxes
                )
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise CapacityExhausted(f"no room for box {self.name}: {error}") from error
                raise SandboxError(
                    f"bubblewrap cannot be started ({starter[0]}): {error}"
                ) from error
            undo.pop_all()

    def admit(self) -> None:
        """Put process 1 under the box's limits. Blocks until bubblewrap has made it.

        All that it starts later inherits them. Nothing when bubblewrap failed: then the socket is
        at its end, and `explain_death` knows why.
        """
        process_id = self._find_first_process()
        if process_id is None:
            return
        try:
            for limit, wanted in (
                (resource.RLIMIT_FSIZE, self._limits.file_bytes),
                (resource.RLIMIT_CORE, 0),
                # inherited otherwise, and then possibly all that the host has
                (resource.RLIMIT_NOFILE, _OPEN_FILES),
                (resource.RLIMIT_SIGPENDING, _SIGNALS),
            ):
                _, most = resource.prlimit(process_id, limit)
                wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
                resource.prlimit(process_id, limit, (wanted, wanted))
            self._group.add(process_id)
        except ProcessLookupError:
            return
        self.process_id = process_id

    def explain_death(self) -> SandboxError:
        """Reason for the end of the box. Only after its socket closed. SandboxLost, OutOfMemory
        where what ran inside is to blame, or SandboxError with the fix where the kernel refuses
        boxes.
        """
        self.kill()
        self._process.wait()
        said = (
            self._process.stderr.read().decode(errors="replace").strip()
            if self._process.stderr
            else ""
        )
        code = self._process.returncode
        text = f"box {self.name} ended with code {code}: {said[-800:] or 'no message'}"
        if self._group.count_memory_kills():
            return OutOfMemory(f"{text}; it was over its memory limit")
        if said.startswith("bwrap:"):
            return SandboxError(f"{text}; {_NO_NAMESPACES}")
        return SandboxLost(text)

    def kill(self) -> None:
        """End everything inside. `close` still frees the rest."""
        if self._process.poll() is None:  # its group too: what it forks may not yet be bound to it
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End the box. The event loop goes on meanwhile."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the box. Blocks until no process of it runs any more."""
        self.socket.close()
        self.kill()
        self._process.wait()
        if self.information_pipe >= 0:  # never admitted: process 1 may have been made all the same
            self._find_first_process()
        first, self._first = self._first, -1
        if first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            end = select.poll()
            end.register(first, select.POLLIN)
            if not end.poll(_END_SECONDS * 1000):
                logger.error("box %s has not ended within %.0f s", self.name, _END_SECONDS)
            os.close(first)
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._group.remove()

    def count_entries_in_memory(self) -> int:
        """Files and folders, be they empty, in the folders that the box has in memory."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            places = [Path(f"/proc/{self.process_id}/root{path}") for path in _IN_MEMORY]
            host = {path.stat().st_dev for path in map(Path, _IN_MEMORY) if path.exists()}
            if host & {place.stat().st_dev for place in places}:
                return 0  # process 1 is made and has not left the host's root yet
            seen = [os.statvfs(place) for place in places]
            return sum(status.f_files - status.f_ffree for status in seen)
        return 0

    def _find_first_process(self) -> int | None:
        """Id of process 1. None: bubblewrap made none, or it has ended."""
        with os.fdopen(self.information_pipe, "rb") as pipe:
            told = pipe.read()
        self.information_pipe = -1
        if not told:
            return None
        process_id = int(json.loads(told)["child-pid"])
        try:
            self._first = os.pidfd_open(process_id)
        except ProcessLookupError:
            return None
        return process_id


def _start_server(server: str | None, descriptor: int, filter_end: int) -> tuple[str, ...]:
    if server is None:
        return ("--seccomp", str(filter_end), "--", AGENT, str(descriptor))
    start = f"from ostinato.infra.sandbox.inside.{server} import main"
    # Not -I: it would ignore PYTHONHASHSEED, and hash order must be the same in every box.
    switches = ("-s", "-S", "-P", "-B", "-X", "utf8", "-c")
    text = f"import sys; sys.path.insert(0, '{LIBRARY}'); {start}; main({descriptor}, {filter_end})"
    return ("--", f"{PYTHON}/bin/python3", *switches, text)


def _isolation(limits: SandboxLimits) -> list[str]:
    """Namespaces, identity, and folders in memory that can be written everywhere."""
    return [
        str(find_bubblewrap()),
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--as-pid-1", "--hostname", "box", "--proc", "/proc", "--dev", "/dev"),
        *(word for path in _IN_MEMORY for word in _memory_folder(path, limits)),
    ]


# for a server that makes namespaces for its runs (inside/apart.py): its rights in the box's own user namespace, and a
# whole /proc, without which the kernel makes no other. It hides that from the runs.
_RUN_MAKER = (
    *("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_NET_ADMIN"),
    *("--ro-bind", "/proc", HIDDEN),
)


def _read_only(*paths: str) -> tuple[str, ...]:
    return tuple(word for path in paths for word in ("--remount-ro", path))


def _memory_folder(path: str, limits: SandboxLimits) -> tuple[str, ...]:
    return ("--size", str(limits.writable_bytes), "--tmpfs", path)


def _variables(environment: dict[str, str]) -> list[str]:
    arguments = ["--clearenv"]
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    return arguments


_ENVIRONMENT = {
    **VARIABLES,
    "PATH": f"{PYTHON}/bin:{PROGRAMS}:/usr/bin:/bin",
    "PYTHONPATH": SITE,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
}


class ControlGroup:
    """Control groups of one box. Has no effect where they cannot be made."""

    def __init__(self, name: str, limits: SandboxLimits) -> None:
        """`name` begins with this process's id and a dash: groups of dead ones are removed."""
        _sweep_dead()
        self._directories: list[Path] = []
        if _is_version_2():
            self._make(_ROOT / _GROUP, name, _version_2(limits))
        else:
            for controller, values in _version_1(limits).items():
                self._make(_ROOT / controller / _GROUP, name, values)

    def add(self, process_id: int) -> None:
        """Take a process in. What it starts from now on belongs to the group too."""
        for directory in self._directories:
            (directory / "cgroup.procs").write_text(str(process_id))

    def count_memory_kills(self) -> int:
        """Number of processes of the group that the kernel ended for memory."""
        files = ("memory.events", "memory.oom_control")
        return sum(
            _read_field(directory / name, "oom_kill")
            for directory in self._directories
            for name in files
        )

    def remove(self) -> None:
        """Drop the groups.

        One that the kernel still counts a process in is dropped at a later call.
        """
        _closing.update(self._directories)
        self._directories.clear()
        for directory in list(_closing):
            if _drop(directory):
                _closing.discard(directory)

    def _make(self, parent: Path, name: str, values: dict[str, str]) -> None:
        directory = parent / name
        try:
            directory.mkdir(parents=True)
            for key, value in values.items():
                (directory / key).write_text(value)
            for key in _VERSION_1_TOO if "memory.limit_in_bytes" in values else ():
                if (directory / key).exists():
                    (directory / key).write_text(values["memory.limit_in_bytes"])
        except OSError:
            _drop(directory)
        else:
            self._directories.append(directory)


@functools.cache
def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


@functools.cache
def _sweep_dead() -> None:
    """Once per process: removes groups whose maker was killed."""
    for parent in (
        _ROOT / _GROUP,
        *(_ROOT / name / _GROUP for name in ("memory", "pids")),
    ):
        if parent.is_dir():
            for directory in parent.iterdir():
                maker = directory.name.partition("-")[0]
                if directory.is_dir() and maker.isdigit() and not Path(f"/proc/{maker}").exists():
                    _drop(directory)


def _read_field(file: Path, name: str) -> int:
    """The number after a name in a file of `name number` lines. 0 where the kernel has none."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _drop(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _version_2(limits: SandboxLimits) -> dict[str, str]:
    return {
        "memory.max": str(limits.memory_bytes),
        "memory.swap.max": "0",
        "pids.max": str(limits.processes),
    }


def _version_1(limits: SandboxLimits) -> dict[str, dict[str, str]]:
    return {
        "memory": {"memory.limit_in_bytes": str(limits.memory_bytes)},
        "pids": {"pids.max": str(limits.processes)},
    }

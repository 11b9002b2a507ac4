"""Control groups: limits on memory and processes of a whole box, where this process may make them.

Version 2 of the hierarchy, else version 1. Where nothing is writable a box keeps its rlimits alone.
"""

import functools
from pathlib import Path

from ostinato.infra.sandbox.protocol import SandboxLimits

_ROOT = Path("/sys/fs/cgroup")
_GROUP = "ostinato"
# limits of memory with swap, and of socket buffers, where the kernel has them
_VERSION_1_TOO = ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
# groups whose last processes had not quite ended when their box was closed
_closing: set[Path] = set()


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

"""Control groups: limits on memory and processes of a whole box, where this process may make them.

Version 2 of the hierarchy, else version 1. Where nothing is writable a box keeps its rlimits alone.
"""

import functools
import os
from pathlib import Path

from ostinato.infra.sandbox.protocol import SandboxLimits

_ROOT = Path("/sys/fs/cgroup")
_GROUP = "ostinato"
# groups whose last processes had not quite ended when their box was closed
_closing: set[str] = set()


class ControlGroup:
    """Control groups of one box. None where they are not available."""

    def __init__(self, name: str, limits: SandboxLimits) -> None:
        """`name` begins with this process's id and a dash: groups of dead ones are removed."""
        _sweep_dead()
        self._directories: list[str] = []
        if _is_version_2():
            self._make(f"{_ROOT}/{_GROUP}", name, _version_2(limits))
        else:
            for controller, values in _version_1(limits).items():
                self._make(f"{_ROOT}/{controller}/{_GROUP}", name, values)

    def add(self, process_id: int) -> None:
        """Take a process in. What it starts from now on belongs to the group too."""
        for directory in self._directories:
            _write(f"{directory}/cgroup.procs", str(process_id))

    def count_memory_kills(self) -> int:
        """Number of processes of the group that the kernel ended for memory."""
        for directory in self._directories:
            for name in ("memory.events", "memory.oom_control"):
                number = _read_field(f"{directory}/{name}", "oom_kill")
                if number:
                    return number
        return 0

    def remove(self) -> None:
        """Drop the groups.

        One that the kernel still counts a process in is dropped at a later call.
        """
        _closing.update(self._directories)
        self._directories.clear()
        for directory in list(_closing):
            if _drop(directory):
                _closing.discard(directory)

    def _make(self, parent: str, name: str, values: dict[str, str]) -> None:
        directory = f"{parent}/{name}"
        try:
            _make_parent(parent)
            os.mkdir(directory)  # noqa: PTH102 -- text paths: every box's start comes through here
            self._directories.append(directory)
            for key, value in values.items():
                _write(f"{directory}/{key}", value)
        except OSError:
            if directory in self._directories:
                self._directories.remove(directory)
                _drop(directory)


@functools.cache
def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


@functools.cache
def _make_parent(parent: str) -> None:
    Path(parent).mkdir(parents=True, exist_ok=True)


@functools.cache
def _sweep_dead() -> None:
    """Once a process: drop groups whose maker was killed before it could."""
    for parent in (
        _ROOT / _GROUP,
        *(_ROOT / name / _GROUP for name in ("memory", "pids")),
    ):
        if parent.is_dir():
            for directory in parent.iterdir():
                maker = directory.name.partition("-")[0]
                if directory.is_dir() and maker.isdigit() and not Path(f"/proc/{maker}").exists():
                    _drop(str(directory))


def _write(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _read(file: str) -> str:
    """Text of a file. Empty where the kernel has none."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 65_536).decode()
    finally:
        os.close(descriptor)


def _read_field(file: str, name: str) -> int:
    """The number after a name in a file of `name number` lines."""
    lines = _read(file).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _drop(directory: str) -> bool:
    try:
        os.rmdir(directory)  # noqa: PTH106
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

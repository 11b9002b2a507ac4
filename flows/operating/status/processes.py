"""Snapshots of this machine's processes: descendants, stopped processes, computing processes."""

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import psutil

# Processes in boxes run other people's code, and a box is stopped while its files are read, so they are left out.
_BOXES = ("bwrap", "qemu-system")
_COMPUTING_RATIO = 0.03  # of a core
_SAMPLES = 4
_PAUSE_SECONDS = 0.4


class ProcessTable:
    """A snapshot of the process table."""

    def __init__(self) -> None:
        self._processes: dict[int, dict[str, Any]] = {}
        self._children: dict[int, list[int]] = {}
        for found in psutil.process_iter(["ppid", "name", "status"]):
            self._processes[found.pid] = found.info
            self._children.setdefault(found.info["ppid"] or 0, []).append(found.pid)

    def family(self, pid: int, *, with_boxes: bool = False) -> list[int]:
        """A process and its descendants. Boxes and the processes in them are left out unless `with_boxes`."""
        known = self._processes.get(pid)
        if known is None or ((known["name"] or "").startswith(_BOXES) and not with_boxes):
            return []
        below = (self.family(child, with_boxes=with_boxes) for child in self._children.get(pid, ()))
        return [pid, *(member for members in below for member in members)]

    def is_any_running(self, pids: Collection[int]) -> bool:
        """Whether any of the processes is running or runnable."""
        return any(self._state(pid) == psutil.STATUS_RUNNING for pid in pids)

    def stopped(self, pids: Collection[int]) -> list[int]:
        """Processes that a signal stopped."""
        return [pid for pid in pids if self._state(pid) == psutil.STATUS_STOPPED]

    def is_live(self, pid: int) -> bool:
        """Whether the process exists and is not a zombie."""
        return pid in self._processes and self._state(pid) != psutil.STATUS_ZOMBIE

    def _state(self, pid: int) -> str | None:
        return self._processes[pid]["status"] if pid in self._processes else None


def say_stopped(pids: Sequence[int]) -> str:
    """The cause of a stall for processes that a signal stopped."""
    text = " ".join(map(str, pids))
    return f"process {text} is stopped by a signal; `kill -CONT {text}` continues it"


def are_computing(roots: Sequence[int]) -> bool:
    """Whether the processes or their descendants compute, wait for a core, or start others."""
    before: dict[int, float] = {}
    for sample in range(_SAMPLES):
        table = ProcessTable()
        family = [pid for root in roots for pid in table.family(root, with_boxes=True)]
        now = {pid: _cpu_seconds(pid) for pid in family}
        if table.is_any_running(family):
            return True
        if sample:
            used = sum(seconds - before.get(pid, 0.0) for pid, seconds in now.items())
            if now.keys() - before.keys() or used > _COMPUTING_RATIO * _PAUSE_SECONDS:
                return True
        before = now
        time.sleep(_PAUSE_SECONDS)
    return False


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its ended children."""
    with contextlib.suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    return 0.0

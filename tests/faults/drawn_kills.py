"""SIGKILL of drawn processes of a home: one of the kind that was hit least often, its process group, or all of them."""

import contextlib
import os
import random
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.fakes.processes import command_line, is_running, of_home

_KINDS = {  # an actor's class, a service of `ostinato up`, or a program
    r"prefect\.engine": "flow",
    r"prefect worker": "worker",
    r"prefect_server": "server",
    r"gateway_process": "gateway",
    r"multiprocessing\.spawn import spawn_main": "rank",  # of a training without Ray
    r"ray::(\w+)": "",
    r"(chaos_program|child_main|bwrap|gcs_server|raylet) ": "",
}


def kind_of(process: psutil.Process) -> str:
    """Role of a process in a run. Empty: none that is killed alone."""
    command = command_line(process)
    for pattern, kind in _KINDS.items():
        if found := re.search(pattern, command):
            return kind or found[1]
    return ""


class DrawnKills:
    """Kills of one home."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home = home
        self.dice = random.Random(seed)
        self.hit: Counter[str] = Counter()

    def kill(self, wanted: str = "") -> str:
        """Kills once: a process of the kind `wanted` if one is alive, else one of the kind that was hit least often.
        Returns the kind of the process, or "all".
        """
        found = defaultdict(list)
        for process in self._processes():
            if kind := kind_of(process):
                found[kind].append(process)
        kind = min({*found, "all"}, key=lambda kind: (self.hit[kind], self.dice.random()))
        kind = wanted if wanted in found else kind
        self.hit[kind] += 1
        if kind == "all":
            for process in of_home(self._home):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return kind
        victim = self.dice.choice(found[kind])
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            group = os.getpgid(victim.pid)
            if self.dice.random() < 0.3 and group != os.getpgrp():
                os.killpg(group, signal.SIGKILL)
            else:
                victim.kill()
        return kind

    def lives(self, kind: str) -> bool:
        """Whether a process of a kind is alive."""
        return any(kind_of(process) == kind for process in self._processes())

    def _processes(self) -> Iterator[psutil.Process]:
        """Processes of the home, and their boxes, which are told of no home."""
        for process in of_home(self._home):
            yield process
            with contextlib.suppress(psutil.Error):
                yield from (one for one in process.children() if kind_of(one) == "bwrap")


def left_of(home: Path, before: set[int]) -> Callable[[], list[psutil.Process]]:
    """Finds the processes of a home, and boxes that nobody holds any more."""

    def find() -> list[psutil.Process]:
        boxes = [
            one
            for one in psutil.process_iter()
            if one.pid not in before and kind_of(one) == "bwrap" and is_running(one)
        ]
        with contextlib.suppress(psutil.NoSuchProcess):
            return [*of_home(home), *(one for one in boxes if one.ppid() == 1)]
        return [*of_home(home), *boxes]

    return find

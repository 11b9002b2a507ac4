"""Processes that may end while a test looks at them, and what a test starts as the installed command."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

COMMAND = "from ostinato.flows.cli import main; main()"  # what the installed script runs


def run_command(
    home: Path, *arguments: str, cwd: Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `ostinato ARGUMENTS` with a home to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, "OSTINATO_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def command_line(process: psutil.Process) -> str:
    """Its command; empty when it has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_running(process: psutil.Process | int) -> bool:
    """Whether it has not ended. A zombie has: who reaps orphans, and when, is the machine's affair."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(find: Callable[[], list[psutil.Process]], limit_seconds: float = 200.0) -> None:
    """Returns when there is none any more; AssertionError with the commands of those that stay."""
    deadline = time.monotonic() + limit_seconds
    while left := find():
        assert time.monotonic() < deadline, [command_line(process) for process in left]
        time.sleep(0.1)


def wait_for_child(
    process: psutil.Process, told: str, limit_seconds: float = 60.0
) -> list[psutil.Process]:
    """All descendants, once the command of one holds `told`. A process that changes its parent while they
    are listed is missed.
    """
    deadline = time.monotonic() + limit_seconds
    while True:
        found = process.children(recursive=True)
        if any(told in command_line(child) for child in found):
            return found
        assert time.monotonic() < deadline, [command_line(child) for child in found]
        time.sleep(0.05)


def of_home(home: Path) -> list[psutil.Process]:
    """Every live process that was told of this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OSTINATO_HOME") == str(home) and is_running(process):
                found.append(process)
        except psutil.Error:
            continue
    return found

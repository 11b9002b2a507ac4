"""A command that is stopped leaves no process behind, at whatever moment, and goes on when typed again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import command_line

COMMAND = "from ostinato.flows.cli import main; main()"  # what the installed script runs
# Pretraining that no moment of a test outlives.
RECIPE = """
extends = "miniature"
name = "stopped"

[[pretraining.phases]]
name = "bulk"
blend = { library = [0.5, 0.5], repair = [0.5, 0.5] }
tokens = 8_192_000
sequence_tokens = 256
microbatch_tokens = 2048
global_batch_tokens = 4096
muon_learning_rate = 0.004
adam_learning_rate = 8e-4
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_SECONDS = 25.0


def start(home: Path) -> subprocess.Popen[str]:
    recipe = home / "stopped.toml"
    recipe.write_text(RECIPE)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, "run", "continued_pretraining", "--recipe", recipe],
        env={**os.environ, "OSTINATO_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def of_home(home: Path) -> list[psutil.Process]:
    """Every live process that was told of this home."""
    found = []
    for process in psutil.process_iter():
        try:
            is_of_home = process.environ().get("OSTINATO_HOME") == str(home)
            if is_of_home and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def stop(home: Path, command: subprocess.Popen[str], number: int) -> str:
    """Signals the command alone; returns what it said."""
    command.send_signal(number)
    deadline = time.monotonic() + END_SECONDS
    said, _ = command.communicate(timeout=END_SECONDS)
    while left := of_home(home):
        assert time.monotonic() < deadline, [command_line(process) for process in left]
        time.sleep(0.2)
    return said


def begin(home: Path) -> float:
    """Builds what comes before pretraining; returns the seconds until its first rank starts."""
    command = start(home)
    began = time.monotonic()
    try:
        while not list(home.glob("runs/*/pretrained-*/child.pid")):
            assert command.poll() is None, command.communicate()[0]
            time.sleep(0.1)
        seconds = time.monotonic() - began
    finally:
        stop(home, command, signal.SIGINT)
    return seconds


def check_moments(home: Path, moments: int, seed: int) -> None:
    begin(home)
    draw = random.Random(seed)
    for moment in range(moments):
        number = SIGNALS[moment % len(SIGNALS)]
        command = start(home)
        pid_file = None
        wait = draw.random()
        if moment % 2 == 0:
            # the first seconds of pretraining, when the ranks are about to meet
            while pid_file is None:
                assert command.poll() is None, command.communicate()[0]
                live = [p for p in of_home(home) if "child_main" in command_line(p)]
                pid_file = live[0] if live else None
                time.sleep(0.05)
            time.sleep(12 * wait)
        else:
            time.sleep(25 * wait)
        ended = command.poll() is not None
        said = stop(home, command, number) if not ended else ""
        if not ended and command.returncode == 130:
            assert "the same command continues" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_at_three_moments_nothing_is_left(tmp_path: Path) -> None:
    check_moments(tmp_path, 3, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(3_000)
def test_stopped_at_thirty_moments_nothing_is_left(tmp_path: Path) -> None:
    check_moments(tmp_path, 30, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_command_takes_server_and_flow_along(tmp_path: Path) -> None:
    """SIGKILL of the command itself: what it started ends; a stage under way may go on."""
    command = start(tmp_path)
    while not any("run_flow" in command_line(process) for process in of_home(tmp_path)):
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.1)
    command.kill()
    command.wait()
    deadline = time.monotonic() + END_SECONDS
    while left := of_home(tmp_path):
        assert time.monotonic() < deadline, [command_line(process) for process in left]
        time.sleep(0.2)

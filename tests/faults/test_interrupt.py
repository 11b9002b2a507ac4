"""A command that is stopped leaves no process behind, at whatever moment, and goes on when typed again."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.flows.stages.server_access import SERVER_MODULE
from tests.fakes.processes import COMMAND, command_line, of_home, wait_for_end

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


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home of which nothing runs when the test is over, however it ends."""
    yield tmp_path
    for process in of_home(tmp_path):
        process.kill()


def start(home: Path) -> subprocess.Popen[str]:
    """The command as a terminal starts it: jobs in the background of a shell ignore SIGINT at first, those
    of nohup SIGHUP.
    """
    recipe = home / "stopped.toml"
    recipe.write_text(RECIPE)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, "run", "continued_pretraining", "--recipe", recipe],
        env={**os.environ, "OSTINATO_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in SIGNALS],
    )


def stop(home: Path, command: subprocess.Popen[str], number: int) -> str:
    """Signals the command alone; returns what it said."""
    command.send_signal(number)
    said, _ = command.communicate(timeout=200)
    wait_for_end(lambda: of_home(home))
    return said


def wait_for_command(home: Path, command: subprocess.Popen[str], words: str) -> None:
    """Until a process of the home has the words in its command."""
    while not any(words in command_line(process) for process in of_home(home)):
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.05)


def check_moments(home: Path, moments: int, seed: int) -> None:
    draw = random.Random(seed)
    for moment in range(moments):
        command = start(home)
        wait = draw.random()
        if moment % 2 == 0:
            # the first seconds of pretraining, when the ranks are about to meet
            wait_for_command(home, command, "tasks.pretraining.run:main")
            time.sleep(12 * wait)
        else:
            time.sleep(25 * wait)
        assert command.poll() is None, command.communicate()[0]
        said = stop(home, command, SIGNALS[moment % len(SIGNALS)])
        if "Prefect UI" in said and command.returncode == 130:
            assert "the same command continues" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_stopped_at_three_moments_nothing_is_left(home: Path) -> None:
    check_moments(home, 3, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(3_000)
def test_stopped_at_fifteen_moments_nothing_is_left(home: Path) -> None:
    check_moments(home, 15, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_server", [False, True], ids=["alone", "with its server"])
@pytest.mark.sampled(1)
def test_killed_command_takes_server_and_flow_along(home: Path, with_server: bool) -> None:
    """SIGKILL of the command itself: what it started ends; a stage under way may go on. A flow whose server is gone
    cannot report its end, and does not wait for it.
    """
    command = start(home)
    wait_for_command(home, command, "tasks.problems.run:main" if with_server else "run_flow")
    if with_server:
        [server, *_] = [one for one in of_home(home) if SERVER_MODULE in command_line(one)]
        os.killpg(server.pid, signal.SIGKILL)
    command.kill()
    command.wait()
    wait_for_end(lambda: of_home(home))

"""A command that is stopped leaves no process behind, at whatever moment, and goes on when typed again."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command as a terminal starts it: jobs in the background of a shell ignore SIGINT at first, those
    of nohup SIGHUP. Without arguments it pretrains.
    """
    recipe = home / "stopped.toml"
    recipe.write_text(RECIPE)
    pretraining = ("run", "continued_pretraining", "--recipe", str(recipe))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *(arguments or pretraining)],
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


@contextlib.contextmanager
def silent_model() -> Iterator[tuple[str, threading.Event]]:
    """The address of an API that takes requests and never answers, and the event of the first request."""
    asked, closing = threading.Event(), threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            asked.set()
            closing.wait()

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        closing.set()
        server.shutdown()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_flow", [False, True], ids=["command", "command and flow"])
def test_an_evaluation_that_waits_for_a_model_ends_with_its_command(
    home: Path, with_flow: bool
) -> None:
    with silent_model() as (url, asked):
        command = start(
            home, "evaluate", "--recipe", "miniature", "--endpoint", url, "--model", "m"
        )
        while not asked.wait(0.5):
            assert command.poll() is None, command.communicate()[0]
        flows = [one for one in of_home(home) if "run_flow" in command_line(one)]
        assert flows
        if with_flow:
            for flow in flows:
                flow.terminate()
        begun = time.monotonic()
        stop(home, command, signal.SIGTERM)
        assert time.monotonic() - begun < 35.0  # 11 to 14 s on two busy cores

"""`ostinato up` on a fresh home: a dead service starts again, a killed one is taken over, Ctrl-C leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from ostinato.flows.operating.local_prefect import prefect_environment
from ostinato.flows.operating.up import UpState, running_up
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from tests.fakes.prefect_here import PrefectHere, run_python, wait_until
from tests.faults.test_interrupt import COMMAND, of_home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOY = "from tests.fakes.prefect_flows import deploy; print(deploy('auto-resume'))"
RECIPE = 'extends = "miniature"\nname = "mine"\n'
STEPS = 120


class Machine:
    """`ostinato` commands on a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.recipe = home / "mine.toml"
        self.recipe.write_text(RECIPE)
        self.settings = Settings(
            home=home, prefect_port=find_free_port(), gateway_port=find_free_port()
        )
        self.environment = {**os.environ, **self.settings.to_environment()}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def up(self) -> tuple[subprocess.Popen[str], str]:
        """A running `ostinato up`, and what it said until it was ready."""
        process = self.start("up", "--recipe", str(self.recipe))
        said = ""
        assert process.stdout is not None
        while "Ctrl-C ends" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        return process, said

    def state(self) -> UpState:
        state = running_up(self.settings)
        assert state is not None
        return state

    def pid_of(self, name: str) -> int:
        [service] = [one for one in self.state().services if one.name == name]
        return service.process.pid if service.process is not None else 0


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.start("down").wait(60)


def steps_of(work: Path) -> list[str]:
    log = work / "steps.txt"
    return log.read_text().split() if log.exists() else []


def test_services_start_again_and_a_killed_up_is_taken_over(
    machine: Machine, tmp_path: Path
) -> None:
    first, said = machine.up()
    assert "none: recipe" in said  # a recipe without a serving line has no gateway
    told = prefect_environment(machine.settings, machine.settings.prefect_port)
    counting = run_python(told, DEPLOY).splitlines()[-1]
    with httpx.Client(base_url=f"{told['PREFECT_API_URL']}/", timeout=30) as api:
        here = PrefectHere(
            machine.settings, machine.settings.prefect_port, told, ServiceGroup(), api
        )
        cycle = here.deployment("realtime-cycle/every-5-hours")
        assert cycle["parameters"]["recipe"] == str(machine.recipe)

        work = tmp_path / "work"
        run_id = here.start(counting, directory=str(work), steps=STEPS, seconds_per_step=0.5)
        wait_until("three steps", lambda: len(steps_of(work)) > 3, 90)

        worker = machine.pid_of("prefect-worker")
        os.killpg(worker, signal.SIGKILL)
        wait_until("a new worker", lambda: machine.pid_of("prefect-worker") not in (0, worker), 60)
        assert here.state(run_id)["type"] == "RUNNING"

        first.kill()
        first.wait()
        second, said = machine.up()
        assert "goes on" in said
        wait_until("its end", lambda: here.state(run_id)["type"] == "COMPLETED", 240)
        assert steps_of(work) == [str(step) for step in range(STEPS)]  # one child, never a second

        again = machine.start("up", "--recipe", str(machine.recipe))
        assert "already up" in again.communicate(timeout=60)[0]

        last = here.start(
            counting, directory=str(tmp_path / "last"), steps=STEPS, seconds_per_step=0.5
        )
        wait_until("its start", lambda: len(steps_of(tmp_path / "last")) > 3, 90)
        assert here.state(last)["type"] == "RUNNING"

    began = time.monotonic()
    second.send_signal(signal.SIGINT)
    said, _ = second.communicate(timeout=40)
    assert time.monotonic() - began < 30
    assert "will go on" in said
    assert left(machine.home) == []


def left(home: Path) -> list[psutil.Process]:
    """What still runs; resource trackers of Python end a moment after their owners."""
    deadline = time.monotonic() + 5
    while (found := of_home(home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found

"""`ostinato up` on a fresh home: a dead service starts again, a killed one is taken over, Ctrl-C leaves nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ostinato.flows.operating.local_prefect import prefect_environment
from ostinato.flows.operating.up import UpState, running_up
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from tests.fakes.prefect_here import PrefectHere, open_api, run_python, wait_until
from tests.fakes.processes import COMMAND, of_home, wait_for_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOY = "from tests.fakes.prefect_flows import deploy; print(deploy('auto-resume'))"
RECIPE = 'extends = "miniature"\nname = "mine"\n'
CHANGE = "seed=7"
STEPS = 4


class Machine:
    """`ostinato` commands on a home of its own."""

    def __init__(self, home: Path, recipe: str = "") -> None:
        """`recipe` is the name of a shipped one. One without a serving line is written when absent."""
        self.home = home
        self.recipe = recipe or str(home / "mine.toml")
        self.choice = ("--recipe", self.recipe, "--set", CHANGE)
        if not recipe:
            Path(self.recipe).write_text(RECIPE)
        self.settings = Settings(
            home=home,
            prefect_port=find_free_port(),
            gateway_port=find_free_port(),
            dashboard_port=find_free_port(),
        )
        self.environment = {**os.environ, **self.settings.to_environment()}

    def start(
        self, *arguments: str, output: IO[str] | int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, *arguments],
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def up(self) -> tuple[subprocess.Popen[str], str]:
        """A running `ostinato up`, and what it said until it was ready."""
        process = self.start("up", *self.choice)
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
    machine.start("down").wait(240)


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
    with open_api(told) as api:
        here = PrefectHere(
            machine.settings, machine.settings.prefect_port, told, ServiceGroup(), api
        )
        cycle = here.deployment("realtime-cycle/every-5-hours")
        assert cycle["parameters"] == {
            "recipe": machine.recipe,
            "options": {"overrides": [CHANGE]},
        }

        work, release = tmp_path / "work", tmp_path / "release"
        run_id = here.start(counting, directory=str(work), steps=STEPS, release_file=str(release))
        wait_until("the last step", (work / "waiting").exists, 240)

        worker = machine.pid_of("prefect-worker")
        os.killpg(worker, signal.SIGKILL)
        wait_until("a new worker", lambda: machine.pid_of("prefect-worker") not in (0, worker), 240)
        assert here.state(run_id)["type"] == "RUNNING"

        first.kill()
        first.wait()
        second, said = machine.up()
        assert "resumes" in said
        release.touch()
        wait_until("its end", lambda: here.state(run_id)["type"] == "COMPLETED", 240)
        assert steps_of(work) == [str(step) for step in range(STEPS)]  # one child, never a second

        again = machine.start("up", *machine.choice)
        assert "already up" in again.communicate(timeout=240)[0]

        last = here.start(
            counting,
            directory=str(tmp_path / "last"),
            steps=STEPS,
            release_file=str(tmp_path / "never"),
        )
        wait_until("its start", (tmp_path / "last" / "waiting").exists, 240)
        assert here.state(last)["type"] == "RUNNING"

    second.send_signal(signal.SIGINT)
    said, _ = second.communicate(timeout=240)
    assert "will resume" in said
    wait_for_end(lambda: of_home(machine.home))

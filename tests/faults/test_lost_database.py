"""Prefect's database is deleted and the server killed under `ostinato up`: ledger and artifacts are ours, so nothing is
trained twice.
"""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from ostinato.flows.operating.local_prefect import prefect_environment
from ostinato.infra.platform.cluster.services import ServiceGroup
from ostinato.infra.platform.ledger import open_ledger
from tests.fakes.prefect_here import PrefectHere, open_api, run_python, wait_until
from tests.faults.test_up import DEPLOY, Machine, machine, steps_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2_400)]

__all__ = ["machine"]  # the fixture
FLOW = "problem-building/build-problems"
STEPS = 4


def lose_database(home: Path) -> None:
    """Deletes the files of the server that is down."""
    found = list((home / "prefect").glob("prefect.db*"))
    assert found
    for path in found:
        path.unlink()


def is_deployed(here: PrefectHere) -> bool:
    """Whether the server answers and knows the flow."""
    with suppress(httpx2.HTTPError):
        return here.deployment(FLOW)["name"] == FLOW.partition("/")[2]
    return False


def finish(here: PrefectHere, run_id: str) -> None:
    ends = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    wait_until(f"end of {run_id}", lambda: here.state(run_id)["type"] in ends, 600)
    state = here.state(run_id)
    assert state["type"] == "COMPLETED", state["message"]


def problems_of(machine: Machine) -> list[str]:
    """Fingerprints of all problem sets that were made."""
    ledger = open_ledger(machine.settings)
    found = [row.fingerprint for row in ledger.artifacts.list("problems")]
    ledger.close()
    return sorted(found)


def test_stored_work_outlives_the_database_of_the_server(machine: Machine, tmp_path: Path) -> None:
    told = prefect_environment(machine.settings, machine.settings.prefect_port)
    work, release = tmp_path / "work", tmp_path / "release"
    options = {"directory": str(work), "steps": STEPS, "release_file": str(release)}
    up: subprocess.Popen[str]
    with open_api(told) as api:
        here = PrefectHere(
            machine.settings, machine.settings.prefect_port, told, ServiceGroup(), api
        )
        up, _ = machine.up()
        finish(here, here.start(here.deployment(FLOW)["id"], recipe=machine.recipe))
        made = problems_of(machine)
        assert made
        children = {path: path.read_bytes() for path in machine.home.glob("runs/*/*/child.pid")}
        assert children

        # nothing runs
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=240)
        lose_database(machine.home)
        up, _ = machine.up()
        finish(here, here.start(here.deployment(FLOW)["id"], recipe=machine.recipe))
        assert problems_of(machine) == made
        assert {path: path.read_bytes() for path in children} == children

        # a stage runs
        counting = run_python(told, DEPLOY).splitlines()[-1]
        here.start(counting, **options)
        wait_until("the last step", (work / "waiting").exists, 240)
        server = machine.pid_of("prefect-server")
        os.killpg(server, signal.SIGKILL)
        lose_database(machine.home)
        # the `up` that goes on notices, and a new one would too
        wait_until("deployments", lambda: is_deployed(here), 240)
        up.kill()
        up.wait()
        up, _ = machine.up()
        assert here.deployment(FLOW)["parameters"]["recipe"] == machine.recipe
        counting = run_python(told, DEPLOY).splitlines()[-1]
        again = here.start(counting, **options)
        release.touch()
        finish(here, again)
        assert steps_of(work) == [str(step) for step in range(STEPS)]
        finish(here, here.start(here.deployment(FLOW)["id"], recipe=machine.recipe))
        assert problems_of(machine) == made
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=240)

"""A real server and worker under faults: schedules fire, a retry goes on, an outage ends nothing."""

import datetime
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.flows.stages.naming import as_key
from tests.fakes.prefect_here import PrefectHere, prefect_here, run_python, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CYCLE = "realtime-cycle/every-5-hours"
DEPLOY = "from tests.fakes.prefect_flows import deploy; print(deploy())"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectHere]:
    told = {
        "PREFECT_CLIENT_MAX_RETRIES": "3",  # patience of 14 s in place of a quarter of an hour
        # a schedule that the API changes is planned by this loop, which else looks once a minute
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
    }
    with prefect_here(tmp_path_factory.mktemp("home"), **told) as here:
        yield here


@pytest.fixture(scope="module")
def counting(here: PrefectHere) -> str:
    """Id of the deployment of a flow that counts in a child."""
    return run_python(here.environment, DEPLOY).splitlines()[-1]


def steps_of(work: Path) -> list[str]:
    log = work / "steps.txt"
    return log.read_text().split() if log.exists() else []


def finish(here: PrefectHere, run_id: str, limit_seconds: float) -> dict:
    def is_over() -> dict | None:
        state = here.state(run_id)
        return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

    return wait_until(f"end of {run_id}", is_over, limit_seconds)


def test_deployed_schedule_gives_a_run_within_two_minutes(here: PrefectHere) -> None:
    deployment = here.deployment(CYCLE)

    def scheduled() -> list[dict]:
        return [run for run in here.runs(deployment["id"]) if run["auto_scheduled"]]

    first, *_ = sorted(wait_until("a scheduled run", scheduled, 120), key=_starts_at)
    starts = datetime.datetime.fromisoformat(_starts_at(first))
    grid = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert (starts - grid).total_seconds() % 18_000 == 0


def _starts_at(run: dict) -> str:
    return run["expected_start_time"]


def test_scheduled_run_reaches_running_by_itself(here: PrefectHere) -> None:
    deployment = here.deployment(CYCLE)
    [schedule] = deployment["schedules"]
    soon = datetime.datetime.now(tz=datetime.UTC)

    def planned() -> bool:
        """Sets the schedule to 20 s from now. Again once they have passed: the loop that plans may be slow."""
        nonlocal soon
        if (now := datetime.datetime.now(tz=datetime.UTC)) >= soon:
            soon = now + datetime.timedelta(seconds=20)
            here.api.patch(
                f"deployments/{deployment['id']}/schedules/{schedule['id']}",
                json={"schedule": {**schedule["schedule"], "anchor_date": soon.isoformat()}},
            ).raise_for_status()
        starts = (
            datetime.datetime.fromisoformat(_starts_at(run)) for run in here.runs(deployment["id"])
        )
        return any(abs((start - soon).total_seconds()) < 1 for start in starts)

    def running() -> list[dict]:
        return [run for run in here.runs(deployment["id"]) if run["state_type"] == "RUNNING"]

    wait_until("a planned cycle", planned, 240)
    [run] = wait_until("a running cycle", running, 300)
    assert run["auto_scheduled"]
    here.set_state(run["id"], "CANCELLING", "Cancelling")
    assert finish(here, run["id"], 240)["type"] == "CANCELLED"


def test_run_whose_engine_is_killed_goes_on_after_a_retry(
    here: PrefectHere, counting: str, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    run_id = here.start(
        counting, directory=str(tmp_path / "work"), steps=4, release_file=str(release)
    )
    wait_until("the last step", (tmp_path / "work" / "waiting").exists, 240)
    here.engine_of(run_id).send_signal(signal.SIGKILL)
    pressed = 0

    def has_become(wanted: str) -> bool:
        # Runner and worker both report the crash: the later report undoes a retry pressed between.
        nonlocal pressed
        kind = here.state(run_id)["type"]
        if kind == "CRASHED" and pressed < 3:
            here.set_state(run_id, "SCHEDULED", "AwaitingRetry")
            pressed += 1
        return kind == wanted

    wait_until("crash", lambda: here.state(run_id)["type"] == "CRASHED", 120)
    wait_until("a second start", lambda: has_become("RUNNING"), 240)
    release.touch()
    wait_until("completion", lambda: has_become("COMPLETED"), 240)
    assert steps_of(tmp_path / "work") == ["0", "1", "2", "3"]  # one child, never a second


@pytest.mark.parametrize(
    "outage_seconds",
    [30, pytest.param(600, marks=(pytest.mark.nightly, pytest.mark.timeout(1_500)))],
)
def test_outage_of_the_server_ends_no_stage(
    here: PrefectHere, counting: str, tmp_path: Path, outage_seconds: int
) -> None:
    steps, release = 2 * outage_seconds + 20, tmp_path / "release"
    run_id = here.start(
        counting,
        directory=str(tmp_path),
        steps=steps,
        seconds_per_step=0.5,
        release_file=str(release),
    )
    wait_until("three steps", lambda: len(steps_of(tmp_path)) > 3, 240)
    with here.without_server():
        at = len(steps_of(tmp_path))
        time.sleep(outage_seconds)  # more than twice the patience of the client
        written = len(steps_of(tmp_path)) - at
        assert written > outage_seconds / 3, "the stage was ended or waited for the server"
    release.touch()
    state = finish(here, run_id, 300)
    assert state["type"] == "COMPLETED", state["message"]
    assert steps_of(tmp_path) == [str(step) for step in range(steps)]
    wanted = {
        "artifacts": {"key": {"any_": [as_key(tmp_path.parent.name, "counting")]}},
        "sort": "UPDATED_DESC",
    }
    newest = here.api.post("artifacts/filter", json=wanted).raise_for_status().json()[0]
    assert float(newest["data"]) == 100.0

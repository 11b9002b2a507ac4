"""A real server and worker: deployments are as written, schedules fire, crashes and outages end nothing."""

import contextlib
import datetime
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx2
import pytest
from prefect.events.actions import DoNothing

from ostinato.flows.operating import local_prefect
from ostinato.flows.operating.deploying import FAILED_CYCLES, QUEUES, automations
from ostinato.flows.operating.resuming import name_waiting_runs, resume_overdue
from ostinato.flows.stages.naming import as_key
from ostinato.infra.platform.cluster.processes import is_alive, live_owners
from ostinato.infra.platform.cluster.workspace import PROCESS, ProcessMark, read_record
from ostinato.infra.platform.ledger import open_ledger
from tests.fakes.prefect_here import PrefectHere, prefect_here, run_python, wait_until
from tests.flows.test_checkpoint_evaluation import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CYCLE = "realtime-cycle/every-5-hours"
DEPLOY = "from tests.fakes.prefect_flows import deploy; print(deploy('ostinato', 'auto-resume'))"

ALARM = """
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from ostinato.flows.operating import deploying

Webhook(method="POST", url="http://127.0.0.1:{port}").save(deploying.ALARM)
with get_client(sync_client=True) as client:
    deploying.make_automations(client)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectHere]:
    told = {
        "PREFECT_CLIENT_MAX_RETRIES": "3",  # patience of 14 s in place of a quarter of an hour
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",  # plans changed schedules; 60 by default
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


def test_stored_deployments_equal_prefect_yaml(here: PrefectHere) -> None:
    # before the tests that move a schedule
    written = local_prefect.deployments()
    for item in written:
        flow = item["entrypoint"].rpartition(".")[2].replace("_", "-")
        stored = here.deployment(f"{flow}/{item['name']}")
        assert stored["entrypoint"] == item["entrypoint"]
        assert stored["parameters"] == item["parameters"]
        assert stored["description"] == item["description"]
        assert stored["tags"] == item["tags"]
        assert stored["work_pool_name"] == item["work_pool"]["name"]
        assert stored["work_queue_name"] == item["work_pool"]["work_queue_name"]
        assert stored["job_variables"] == item["work_pool"]["job_variables"]  # and so no secret
        limit = dict(item["concurrency_limit"])
        assert stored["global_concurrency_limit"]["limit"] == limit.pop("limit")
        options = stored["concurrency_options"]
        assert {name: options[name] for name in limit} == limit
        schedules = [
            {"slug": one["slug"], "active": one["active"], **one["schedule"]}
            for one in stored["schedules"]
        ]
        for schedule, wanted in zip(schedules, item.get("schedules", ()), strict=True):
            assert _comparable(schedule, wanted) == _comparable(wanted, wanted)
    queues = here.api.post("work_pools/ostinato/queues/filter", json={}).raise_for_status().json()
    limits = {queue["name"]: queue["concurrency_limit"] for queue in queues}
    assert {name: limits[name] for name in QUEUES} == QUEUES
    stored = {one["name"] for one in here.api.post("automations/filter", json={}).json()}
    triggers = {one["name"] for item in written for one in item.get("triggers", ())}
    assert stored == triggers | {one.name for one in automations(DoNothing())}


def _comparable(schedule: dict, wanted: dict) -> dict:
    """The keys of prefect.yaml, with instants that are written alike."""
    found = {key: schedule[key] for key in wanted}
    if "anchor_date" in found:
        found["anchor_date"] = datetime.datetime.fromisoformat(found["anchor_date"])
    return found


def test_deployed_schedule_gives_a_run_within_two_minutes(here: PrefectHere) -> None:
    deployment = here.deployment(CYCLE)

    def scheduled() -> list[dict]:
        return [run for run in here.runs(deployment["id"]) if run["auto_scheduled"]]

    first, *_ = sorted(wait_until("a scheduled run", scheduled, 120), key=_starts_at)
    starts = datetime.datetime.fromisoformat(_starts_at(first))
    assert starts == local_prefect.next_cycle(datetime.datetime.now(tz=datetime.UTC))
    grid = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert (starts - grid).total_seconds() % 18_000 == 0
    name_waiting_runs(here.access)
    assert {run["name"] for run in here.runs(deployment["id"])} == {"nano-seed0 realtime-cycle"}


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


@pytest.mark.nightly
def test_crashed_run_goes_on_by_itself_after_a_pause_and_starts_no_second_stage(
    here: PrefectHere, counting: str, tmp_path: Path
) -> None:
    """One of a flow of ours whose engine is killed, and one that is marked as crashed although its
    engine lives.
    """
    program = DEPLOY.replace("'auto-resume'", "'auto-resume', queue='realtime'")
    elsewhere = run_python(here.environment, program).splitlines()[-1]
    release = tmp_path / "release"
    order = {"directory": str(tmp_path / "marked"), "steps": 4, "release_file": str(release)}
    marked = here.start(elsewhere, **order)
    wait_until("the last step", (tmp_path / "marked" / "waiting").exists, 240)
    building = here.deployment("problem-building/build-problems")["id"]
    killed = here.start(building, recipe="miniature")
    child = wait_until("its stage", lambda: stage_of(here, "miniature-seed0/problems-*"), 240)
    crashed_at = datetime.datetime.now(tz=datetime.UTC)
    here.engine_of(killed).send_signal(signal.SIGKILL)
    here.set_state(marked, "CRASHED", "Crashed")
    assert is_alive(child)

    for run_id in (killed, marked):
        began = wait_until("a second start", lambda run_id=run_id: second_start(here, run_id), 300)
        assert (began - crashed_at).total_seconds() > 10  # its pause
    resuming = here.runs(here.deployment("run-resuming/after-a-crash")["id"])
    events = {run["parameters"]["run_id"].removeprefix("prefect.flow-run.") for run in resuming}
    assert events & {killed, marked}
    release.touch()
    for run_id in (killed, marked):
        # not its first end: a report of the crash that comes late crashes it once more
        wait_until("completion", lambda run_id=run_id: has_completed(here, run_id), 300)
        # the process that was marked completes its run while the one after it begins
        wait_until(
            "the end of sub-flows", lambda run_id=run_id: not running_below(here, run_id), 60
        )
    # one child of each, never a second
    assert steps_of(tmp_path / "marked") == ["0", "1", "2", "3"]
    assert stage_of(here, "miniature-seed0/problems-*") == child
    with contextlib.closing(open_ledger(here.settings)) as ledger:
        [built] = ledger.artifacts.list("problems", "miniature")
    [work] = here.settings.home.glob("runs/miniature-seed0/problems-*")
    assert work.name == f"problems-{built.fingerprint}"


def resume_as_up_does(here: PrefectHere) -> None:
    """Prefect holds the event of a crash back for a quarter of an hour when it comes before the one it follows."""
    with contextlib.suppress(httpx2.HTTPError):  # a busy server: at the next look
        resume_overdue(here.access)


def second_start(here: PrefectHere, run_id: str) -> datetime.datetime | None:
    resume_as_up_does(here)
    return began_again(here, run_id)


def has_completed(here: PrefectHere, run_id: str) -> bool:
    resume_as_up_does(here)
    return here.state(run_id)["type"] == "COMPLETED"


def stage_of(here: PrefectHere, folder: str) -> ProcessMark | None:
    """The process that works in a folder of the runs, or worked in it."""
    for work in here.settings.home.glob(f"runs/{folder}"):
        return read_record(work / PROCESS, ProcessMark)
    return None


def running_below(here: PrefectHere, run_id: str) -> list[dict]:
    parent = {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}}
    below = here.api.post("flow_runs/filter", json=parent).raise_for_status().json()
    return [run for run in below if run["state_type"] == "RUNNING"]


def began_again(here: PrefectHere, run_id: str) -> datetime.datetime | None:
    """When a run began for the second time; it may be over by now."""
    query = {"flow_run_id": run_id}
    states = here.api.get("flow_run_states/", params=query).raise_for_status().json()
    began = sorted(one["timestamp"] for one in states if one["type"] == "RUNNING")
    return datetime.datetime.fromisoformat(began[1]) if len(began) > 1 else None


@pytest.mark.nightly
def test_run_that_lost_worker_and_engine_is_found_by_its_heartbeat_and_goes_on(
    here: PrefectHere, counting: str, tmp_path: Path
) -> None:
    work, release = tmp_path / "work", tmp_path / "release"
    run_id = here.start(counting, directory=str(work), steps=4, release_file=str(release))
    wait_until("the last step", (work / "waiting").exists, 240)
    engine = here.engine_of(run_id)
    replace_worker(here)
    engine.kill()
    wait_until("a second start", lambda: began_again(here, run_id), 300)
    release.touch()
    assert finish(here, run_id, 300)["type"] == "COMPLETED"
    assert steps_of(work) == ["0", "1", "2", "3"]


def replace_worker(here: PrefectHere) -> None:
    """SIGKILL to the worker; another takes its place."""
    [worker] = [one for one in here.services.running if one.service.name == "prefect-worker"]
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    wait_until("its death is seen", lambda: here.services.mend(time.time()), 10)
    wait_until("another worker", lambda: here.services.mend(time.time()), 30)


@pytest.mark.nightly
def test_second_trigger_is_dropped_and_a_cancelled_run_leaves_the_stage_to_the_first(
    here: PrefectHere, counting: str, tmp_path: Path
) -> None:
    program = DEPLOY.replace("'auto-resume'", "queue='ci', one_at_a_time=True")
    single = run_python(here.environment, program).splitlines()[-1]
    work, release = tmp_path / "work", tmp_path / "release"
    order = {"directory": str(work), "steps": 2, "release_file": str(release)}
    first = here.start(single, **order)
    wait_until("the last step", (work / "waiting").exists, 240)
    second, sharing = here.start(single, **order), here.start(counting, **order)
    dropped = finish(here, second, 240)
    assert dropped["type"] == "CANCELLED"
    assert "concurrency limit" in dropped["message"]

    wait_until("two that wait", lambda: len(list((work / "owners").glob("[!.]*"))) == 2, 240)
    here.set_state(sharing, "CANCELLING", "Cancelling")
    assert finish(here, sharing, 240)["type"] == "CANCELLED"
    wait_until("one that waits", lambda: len(live_owners(work)) == 1, 240)
    assert not (work / "result.json").exists()
    release.touch()
    assert finish(here, first, 240)["type"] == "COMPLETED"
    assert steps_of(work) == ["0", "1"]


@pytest.mark.nightly
def test_cancelled_run_of_an_earlier_worker_ends_with_its_stage(
    here: PrefectHere, counting: str, tmp_path: Path
) -> None:
    """A worker ends the engines that it started. Those of one that died must see for themselves."""
    work = tmp_path / "work"
    order = {"directory": str(work), "steps": 2, "release_file": str(tmp_path / "never")}
    run_id = here.start(counting, **order)
    wait_until("the last step", (work / "waiting").exists, 240)
    engine = here.engine_of(run_id)
    replace_worker(here)
    here.set_state(run_id, "CANCELLING", "Cancelling")
    assert finish(here, run_id, 60)["type"] == "CANCELLED"
    wait_until("nobody waits for the stage", lambda: not live_owners(work), 5)
    engine.wait(20)
    assert not (work / "result.json").exists()
    mark = read_record(work / PROCESS, ProcessMark)
    assert mark is not None
    assert not is_alive(mark)


def test_unknown_setting_in_a_form_is_refused_before_a_run_exists(here: PrefectHere) -> None:
    deployment = here.deployment("reinforcement/reinforce")
    for parameters in (
        {"options": {"group_sise": 3}},
        {"options": {"group_size": 1}},
        {"recipe": "nanno"},
        {"start": "the newest"},
    ):
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        answer = here.api.post(f"deployments/{deployment['id']}/create_flow_run", json=body)
        assert answer.status_code == httpx2.codes.CONFLICT, answer.text
    assert here.runs(deployment["id"]) == []


def test_regressed_checkpoint_is_rolled_back_when_its_event_comes(here: PrefectHere) -> None:
    with contextlib.closing(open_ledger(here.settings)) as ledger:
        for at, checkpoint in enumerate(("candidate/mine@1", "candidate/mine@2")):
            ledger.promotions.promote("mine", checkpoint, None, "by the test", float(at))
    event = {
        "event": "checkpoint.regressed",
        "occurred": datetime.datetime.now(tz=datetime.UTC).isoformat(),
        "id": str(uuid.uuid4()),
        "resource": {"prefect.resource.id": "ostinato.checkpoint.candidate/mine@2"},
        "payload": {"checkpoint": "candidate/mine@2", "line": "mine", "reason": "users revert"},
    }
    here.api.post("events", json=[event]).raise_for_status()

    def champion() -> str | None:
        with contextlib.closing(open_ledger(here.settings)) as ledger:
            now = ledger.promotions.current("mine")
            return None if now is None else now.checkpoint_id

    wait_until("the one before it", lambda: champion() == "candidate/mine@1", 240)
    wanted = {"filter": {"event": {"name": ["checkpoint.rolled-back"]}}}

    def told() -> list[str]:
        heard = here.api.post("events/filter", json=wanted).raise_for_status().json()["events"]
        return sorted(event["payload"]["reason"] for event in heard)

    wait_until("the event of it", lambda: told() == ["users revert"], 60)
    with contextlib.closing(open_ledger(here.settings)) as ledger:
        ledger.promotions.promote("mine", "candidate/mine@3", None, "by the test", 2.0)
    by_hand = ["cycle", "roll-back", "--line", "mine", "--reason", "by hand"]
    program = f"import sys; sys.argv[1:] = {by_hand}; from ostinato.flows.cli import main; main()"
    run_python(here.environment, program)
    wait_until("the event of the second", lambda: told() == ["by hand", "users revert"], 60)


def test_event_of_ci_evaluates_the_checkpoint_that_it_names_and_trains_nothing(
    here: PrefectHere,
) -> None:
    deployment = here.deployment("checkpoint-evaluation/ci")
    before = set(here.settings.home.glob("runs/*/*"))
    asked = {
        "checkpoint": "candidate/mine@9",
        "suite": "held-out-mutations",
        "commit": "3f2a",
        "against": "candidate/mine@8",
    }
    event = {
        "event": "ci.evaluate.requested",
        "occurred": datetime.datetime.now(tz=datetime.UTC).isoformat(),
        "id": str(uuid.uuid4()),
        "resource": {"prefect.resource.id": "ci.job"},
        "payload": asked,
    }
    here.api.post("events", json=[event]).raise_for_status()
    [run] = wait_until("its run", lambda: here.runs(deployment["id"]), 120)
    assert {name: run["parameters"].get(name) for name in asked} == asked
    state = finish(here, run["id"], 240)
    assert state["type"] == "FAILED"
    assert "candidate/mine@9" in state["message"]
    assert set(here.settings.home.glob("runs/*/*")) == before


@pytest.mark.nightly
def test_checkpoint_whose_evaluation_passed_is_promoted_once_where_the_recipe_asks(
    here: PrefectHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(here.settings.home))
    line = '[serving]\nline = "evaluated"\n'
    recipe, [quiet, asked] = prepare(here.settings.home, 0.5, 0.6, text=line)
    evaluation, promotion = (
        here.deployment(name) for name in ("checkpoint-evaluation/ci", "promotion/offer-to-users")
    )
    once = {"recipe": recipe, "suite": "held-out-mutations"}
    asks = {"checkpoint": asked, "options": {"promote": True}}
    for parameters in ({"checkpoint": quiet}, asks):
        run = here.start(evaluation["id"], **once, **parameters)
        assert finish(here, run, 240)["type"] == "COMPLETED"
    [promoting] = wait_until("its promotion", lambda: here.runs(promotion["id"]), 120)
    state = finish(here, promoting["id"], 240)
    assert state["type"] == "COMPLETED", state["message"]
    assert promoting["parameters"]["options"]["promote"] is True
    # a champion is not offered again, and the promotion's own gate starts no other
    assert finish(here, here.start(evaluation["id"], **once, **asks), 240)["type"] == "COMPLETED"
    wanted = {"filter": {"event": {"name": ["checkpoint.gate.passed"]}}}

    def gates() -> int:
        found = here.api.post("events/filter", json=wanted).raise_for_status().json()["events"]
        return len(found)

    wait_until("all four gates", lambda: gates() == 4, 60)
    time.sleep(5)
    assert len(here.runs(promotion["id"])) == 1
    with contextlib.closing(open_ledger(here.settings)) as ledger:
        assert [row.checkpoint_id for row in ledger.promotions.history("evaluated")] == [asked]


def test_third_failed_cycle_calls_the_webhook_of_the_alarm(here: PrefectHere) -> None:
    called = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            called.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Listener) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        run_python(here.environment, ALARM.format(port=listener.server_port))
        deployment = here.deployment(CYCLE)
        failed = [
            {
                "event": "prefect.flow-run.Failed",
                "occurred": datetime.datetime.now(tz=datetime.UTC).isoformat(),
                "id": str(uuid.uuid4()),
                "resource": {
                    "prefect.resource.id": f"prefect.flow-run.{uuid.uuid4()}",
                    "prefect.resource.name": f"cycle {number}",
                },
                "related": [
                    {
                        "prefect.resource.id": f"prefect.deployment.{deployment['id']}",
                        "prefect.resource.role": "deployment",
                        "prefect.resource.name": deployment["name"],
                    }
                ],
            }
            for number in range(FAILED_CYCLES)
        ]
        here.api.post("events", json=failed).raise_for_status()
        wait_until("a call", lambda: called, 120)
        listener.shutdown()
    assert "alarm: cycles fail" in called[0]


def test_outage_of_the_server_ends_no_stage(
    here: PrefectHere, counting: str, tmp_path: Path
) -> None:
    check_outage(here, counting, tmp_path, 30)  # more than twice the patience of the client
    wanted = {
        "artifacts": {"key": {"any_": [as_key(tmp_path.parent.name, "counting")]}},
        "sort": "UPDATED_DESC",
    }
    newest = here.api.post("artifacts/filter", json=wanted).raise_for_status().json()[0]
    assert float(newest["data"]) == 100.0


@pytest.mark.nightly
@pytest.mark.timeout(2_400)
def test_outage_of_ten_minutes_ends_nothing(tmp_path: Path) -> None:
    """With the patience that `ostinato up` gives: a worker of less patience ends after seven minutes,
    and its runs with it. So long a patience also means that progress is told minutes later.
    """
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    with prefect_here(home) as here:
        counting = run_python(here.environment, DEPLOY).splitlines()[-1]
        check_outage(here, counting, work, 600)


def check_outage(here: PrefectHere, counting: str, work: Path, outage_seconds: int) -> None:
    """A stage goes on while the server is away, and its run ends well when it is back."""
    steps, release = 2 * outage_seconds + 20, work / "release"
    run_id = here.start(
        counting, directory=str(work), steps=steps, seconds_per_step=0.5, release_file=str(release)
    )
    wait_until("three steps", lambda: len(steps_of(work)) > 3, 240)
    with here.without_server():
        at = len(steps_of(work))
        time.sleep(outage_seconds)
        written = len(steps_of(work)) - at
        assert written > outage_seconds / 3, "the stage was ended or waited for the server"
    release.touch()
    state = finish(here, run_id, 900 if outage_seconds > 60 else 300)
    assert state["type"] == "COMPLETED", state["message"]
    assert steps_of(work) == [str(step) for step in range(steps)]

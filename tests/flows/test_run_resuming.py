"""A crashed run begins again, later with each attempt, until a person is needed."""

import datetime
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.flows import flow
from prefect.settings import get_current_settings
from prefect.states import Crashed, Pending, Running, Scheduled

from ostinato.flows.operating.resuming import MAX_ATTEMPTS, resume_overdue
from ostinato.flows.operating.status.flow_runs import PrefectRows
from ostinato.flows.operating.status.processes import ProcessTable
from ostinato.flows.operating.status.rows import Fault, Thresholds
from ostinato.flows.operating.status.services import UpProcess
from ostinato.flows.run_resuming import GIVEN_UP, run_resuming
from ostinato.flows.stages.server_access import ServerAccess, open_api
from ostinato.infra.platform.settings import Settings


@flow(name="crashing")
def crashing() -> None:
    """Never called: only its runs are of interest."""


def crashed(client: SyncPrefectClient, times: int, *tags: str) -> FlowRun:
    """A run that crashed so often."""
    run = client.create_flow_run(crashing, tags=tags)
    for _ in range(times):
        client.set_flow_run_state(run.id, Running(), force=True)
        client.set_flow_run_state(run.id, Crashed(), force=True)
    return run


def died_unbegun(client: SyncPrefectClient, times: int) -> FlowRun:
    """A run whose process ended so often before the flow's first line."""
    run = client.create_flow_run(crashing, tags=["auto-resume"])
    for _ in range(times):
        client.set_flow_run_state(run.id, Scheduled(), force=True)
        client.set_flow_run_state(run.id, Pending(), force=True)
        client.set_flow_run_state(run.id, Crashed(message="ModuleNotFoundError: no"), force=True)
    assert client.read_flow_run(run.id).run_count == 0
    return client.read_flow_run(run.id)


@pytest.mark.parametrize("times", [1, 3, MAX_ATTEMPTS, MAX_ATTEMPTS - 2])
@pytest.mark.sampled(2)  # one begins again, one does not
def test_run_that_dies_before_it_begins_is_not_begun_for_ever(
    prefect_server: None, times: int
) -> None:
    """The first Pending is the state that the test's run is made with: an attempt too."""
    with get_client(sync_client=True) as client:
        run = died_unbegun(client, times)
        state = run_resuming(str(run.id), return_state=True)
        if times + 1 < MAX_ATTEMPTS:
            assert str(state.message).endswith(f"restarts in {10 * 2**times} s")
        else:
            assert state.name == GIVEN_UP
            access = ServerAccess(str(get_current_settings().api.url))
            assert run.name not in resume_overdue(access, after_seconds=0.0)
            assert client.read_flow_run(run.id).state_type == StateType.CRASHED


def test_status_names_a_run_that_died_before_it_began(prefect_server: None, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with (
        get_client(sync_client=True) as client,
        open_api(ServerAccess(str(get_current_settings().api.url))) as api,
    ):
        run = died_unbegun(client, 2)
        processes = ProcessTable()
        up = UpProcess(settings, processes)
        for state in (None, Scheduled(name="AwaitingRetry")):
            if state is not None:
                client.set_flow_run_state(run.id, state, force=True)
            asked = PrefectRows(
                api, up, processes, home=tmp_path, now=time.time(), thresholds=Thresholds()
            )
            [row] = [row for row in asked.rows() if row.part == f"flow run {run.name}"]
            assert row.fault == Fault.STUCK_RUN
            assert row.cause == "it died before it started: ModuleNotFoundError: no"
            assert row.progress == f"attempt 3 of {MAX_ATTEMPTS}"
        client.delete_flow_run(run.id)


@pytest.mark.parametrize("times", [2, 1, 4])
@pytest.mark.sampled(1)
def test_crashed_run_begins_again_after_a_pause_that_doubles(
    prefect_server: None, times: int
) -> None:
    with get_client(sync_client=True) as client:
        run = crashed(client, times, "auto-resume")
        before = datetime.datetime.now(tz=datetime.UTC)
        state = run_resuming(f"prefect.flow-run.{run.id}", return_state=True)
        assert state.is_completed(), state.message
        found = client.read_flow_run(run.id)
        assert found.state is not None
        assert found.state.name == "AwaitingRetry"
        starts = found.state.state_details.scheduled_time
        assert starts is not None
        seconds = 10 * 2 ** (times - 1)
        assert starts.timestamp() - before.timestamp() >= seconds
        assert str(state.message).endswith(f"restarts in {seconds} s")
        state = run_resuming(str(run.id), return_state=True)
        assert "is now scheduled" in str(state.message)


def test_crash_whose_event_was_lost_is_resumed_by_up(prefect_server: None) -> None:
    access = ServerAccess(str(get_current_settings().api.url))
    with get_client(sync_client=True) as client:
        run = crashed(client, 1, "auto-resume")
        others = [crashed(client, MAX_ATTEMPTS, "auto-resume"), crashed(client, 1)]
        assert resume_overdue(access) == []  # its event may still come
        assert resume_overdue(access, after_seconds=0.0) == [run.name]
        assert client.read_flow_run(run.id).state_name == "AwaitingRetry"
        assert {client.read_flow_run(one.id).state_name for one in others} == {"Crashed"}
        assert resume_overdue(access, after_seconds=0.0) == []


@pytest.mark.parametrize(
    ("times", "tags"), [(MAX_ATTEMPTS, ["auto-resume"]), (1, [])], ids=["too often", "not tagged"]
)
@pytest.mark.sampled(1)
def test_run_that_may_not_be_resumed_stays_crashed(
    prefect_server: None, times: int, tags: list[str]
) -> None:
    with get_client(sync_client=True) as client:
        run = crashed(client, times, *tags)
        state = run_resuming(str(run.id), return_state=True)
        assert (state.type, state.name) == (StateType.FAILED, GIVEN_UP)
        assert client.read_flow_run(run.id).state_type == StateType.CRASHED

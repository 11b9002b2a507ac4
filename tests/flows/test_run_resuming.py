"""A crashed run begins again, later with each attempt, until a person is needed."""

import datetime

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.flows import flow
from prefect.settings import get_current_settings
from prefect.states import Crashed, Running

from ostinato.flows.operating.resuming import MAX_ATTEMPTS, resume_overdue
from ostinato.flows.operating.server_access import ServerAccess
from ostinato.flows.run_resuming import GIVEN_UP, run_resuming


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


@pytest.mark.parametrize("times", [1, 2, 4])
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
        assert str(state.message).endswith(f"begins again in {seconds} s")
        state = run_resuming(str(run.id), return_state=True)
        assert "is scheduled by now" in str(state.message)


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
def test_run_that_may_not_be_resumed_stays_crashed(
    prefect_server: None, times: int, tags: list[str]
) -> None:
    with get_client(sync_client=True) as client:
        run = crashed(client, times, *tags)
        state = run_resuming(str(run.id), return_state=True)
        assert (state.type, state.name) == (StateType.FAILED, GIVEN_UP)
        assert client.read_flow_run(run.id).state_type == StateType.CRASHED

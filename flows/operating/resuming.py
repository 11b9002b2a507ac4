"""Runs of deployments, through the server's API: reschedules runs that lost their process, and names waiting runs."""

import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2

from ostinato.flows.operating.local_prefect import AUTO_RESUME, DEPLOYED, WORK_POOL
from ostinato.flows.recipe_text import run_title
from ostinato.flows.stages.server_access import ServerAccess, ask, open_api
from ostinato.infra.platform.record import Record

MAX_ATTEMPTS = 8  # of one run, after which a person is needed
_RECENT = timedelta(hours=1)
_WAITING_SINCE = timedelta(minutes=10)
_FIRST_WAIT_SECONDS = 10.0  # after the first crash; doubled by each further one
_STARTED = ("PENDING", "RUNNING", "PAUSED", "CANCELLING")


class InterruptedRun(Record):
    """A run of a deployment that has started, with its number of attempts."""

    run_id: str
    title: str
    state: str
    attempts: int
    may_resume: bool

    @property
    def wait_seconds(self) -> float:
        """Pause between the last crash and the next attempt."""
        return _FIRST_WAIT_SECONDS * 2 ** max(0, self.attempts - 1)


def interrupted_runs(access: ServerAccess) -> list[InterruptedRun]:
    """Runs of the work pool that the server considers active."""
    with open_api(access, timeout=10) as api:
        runs = _active_runs(api, work_pools={"name": {"any_": [WORK_POOL]}})
        return [_interrupted(api, run) for run in runs]


def schedule_again(access: ServerAccess) -> list[str]:
    """Reschedules runs that lost their process with the previous `ostinato up`, and returns their titles.
    Runs that may not be resumed end as crashed or cancelled. Sub-flows end as crashed, because a resumed
    run starts new ones.
    """
    resumed = []
    found = interrupted_runs(access)
    with open_api(access) as api:
        for run in found:
            _end_sub_flows(api, run.run_id)
            if run.state == "CANCELLING":
                _set_state(api, run.run_id, "CANCELLED", "Cancelled", "its process is gone")
            elif not run.may_resume:
                message = f"its process is gone; attempt {run.attempts}"
                _set_state(api, run.run_id, "CRASHED", "Crashed", message)
            else:
                message = "continues with its finished stages"
                _set_state(api, run.run_id, "SCHEDULED", "AwaitingRetry", message)
                resumed.append(run.title)
    return resumed


def resume_crashed(access: ServerAccess, run_id: str) -> InterruptedRun:
    """Reschedules a crashed run after a pause, if it may be resumed. Ends its sub-flows, because the
    resumed run starts new ones. Returns the run as it was found.
    """
    with open_api(access) as api:
        run = _interrupted(api, api.get(f"/flow_runs/{run_id}").raise_for_status().json())
        if run.state != "CRASHED":
            return run
        _end_sub_flows(api, run_id)
        if run.may_resume:
            starts_at = datetime.now(tz=UTC) + timedelta(seconds=run.wait_seconds)
            message = f"resumed after crash {run.attempts}"
            _set_state(api, run_id, "SCHEDULED", "AwaitingRetry", message, starts_at)
    return run


def resume_overdue(access: ServerAccess, after_seconds: float = 60.0) -> list[str]:
    """Reschedules runs that crashed within the last hour and were not resumed. Returns their titles.

    A crash's event is lost when the server dies at that moment. Prefect also delays it by a quarter of an hour when an
    earlier event was lost.
    """
    now = datetime.now(tz=UTC)
    crashed = {
        "state": {"type": {"any_": ["CRASHED"]}},
        "tags": {"all_": [AUTO_RESUME]},
        "parent_task_run_id": {"is_null_": True},  # not a sub-flow
        "end_time": {
            "after_": (now - _RECENT).isoformat(),
            "before_": (now - timedelta(seconds=after_seconds)).isoformat(),
        },
    }
    with open_api(access, timeout=10) as api:
        runs = ask(api, "/flow_runs/filter", {"flow_runs": crashed})
        found = [_interrupted(api, run) for run in runs]
    return [resume_crashed(access, run.run_id).title for run in found if run.may_resume]


def count_attempts(states: Sequence[Mapping[str, Any]]) -> int:
    """Number of times a run was started, from its states, oldest first. The server's own count misses attempts that
    ended before the flow's first line.
    """
    kinds = ["", *(state["type"] for state in states)]
    return sum(
        now in _STARTED and before not in _STARTED for before, now in itertools.pairwise(kinds)
    )


def states_of(api: httpx2.Client, run_id: str) -> list[dict[str, Any]]:
    """All states of a run, oldest first."""
    answer = api.get("/flow_run_states/", params={"flow_run_id": run_id}).raise_for_status()
    return sorted(answer.json(), key=lambda state: state["timestamp"])


def _active_runs(api: httpx2.Client, **other: Any) -> list[dict[str, Any]]:
    states = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    flow_runs = {**states, **other.pop("flow_runs", {})}
    return ask(api, "/flow_runs/filter", {"flow_runs": flow_runs, **other})


def _interrupted(api: httpx2.Client, run: dict[str, Any]) -> InterruptedRun:
    recipe = run["parameters"].get("recipe", "")
    attempts = count_attempts(states_of(api, run["id"]))
    return InterruptedRun(
        run_id=run["id"],
        title=f"{run['name']} ({recipe})" if recipe else run["name"],
        state=run["state_type"],
        attempts=attempts,
        may_resume=AUTO_RESUME in run["tags"] and attempts < MAX_ATTEMPTS,
    )


def _end_sub_flows(api: httpx2.Client, run_id: str) -> None:
    below = {"parent_flow_run_id": {"any_": [run_id]}}
    for child in _active_runs(api, flow_runs=below):
        _end_sub_flows(api, child["id"])
        _set_state(api, child["id"], "CRASHED", "Crashed", "its process is gone")


def _set_state(
    api: httpx2.Client,
    run_id: str,
    kind: str,
    name: str,
    message: str,
    starts_at: datetime | None = None,
) -> None:
    state: dict[str, Any] = {"type": kind, "name": name, "message": message}
    if starts_at is not None:
        state["state_details"] = {"scheduled_time": starts_at.isoformat()}
    body = {"state": state, "force": True}
    api.post(f"/flow_runs/{run_id}/set_state", json=body).raise_for_status()


def name_waiting_runs(access: ServerAccess) -> None:
    """Gives their final name to runs that have not started, including those dropped before a start. Until then Prefect
    names them with two random words.
    """
    since = (datetime.now(tz=UTC) - _WAITING_SINCE).isoformat()
    not_begun = {
        "start_time": {"is_null_": True},
        "expected_start_time": {"after_": since},
        "tags": {"all_": [DEPLOYED]},
    }
    with open_api(access, timeout=10) as api:
        waiting = ask(api, "/flow_runs/filter", {"flow_runs": not_begun})
        unnamed = [run for run in waiting if " " not in run["name"]]
        if not unnamed:
            return
        names = {flow["id"]: flow["name"] for flow in ask(api, "/flows/filter", {})}
        for run in unnamed:
            title = run_title(names[run["flow_id"]], run["parameters"])
            if title != run["name"]:
                api.patch(f"/flow_runs/{run['id']}", json={"name": title}).raise_for_status()

"""Runs of deployments whose process is gone: found over the server's API, and scheduled again."""

from collections.abc import Iterator
from typing import Any

import httpx

from ostinato.flows.operating.local_prefect import AUTO_RESUME, WORK_POOL
from ostinato.infra.platform.record import Record

MAX_ATTEMPTS = 8  # of one run; beyond that a person is needed


class InterruptedRun(Record):
    """A run of a deployment that had begun."""

    run_id: str
    title: str
    state: str
    attempts: int
    may_resume: bool


def interrupted_runs(url: str) -> list[InterruptedRun]:
    """Runs of the work pool that are under way as far as the server knows."""
    with httpx.Client(base_url=url, timeout=10) as api:
        return [_interrupted(run) for run in _under_way(api, work_pools=_named(WORK_POOL))]


def schedule_again(url: str) -> list[str]:
    """Schedules runs again whose process ended with the `ostinato up` before this one. Returns their
    titles. Others end as crashed or cancelled, and so do sub-flows, of which a resumed run makes new
    ones.
    """
    resumed = []
    with httpx.Client(base_url=url, timeout=30) as api:
        for run in [_interrupted(run) for run in _under_way(api, work_pools=_named(WORK_POOL))]:
            _end_below(api, run.run_id)
            if run.state == "CANCELLING":
                _set_state(api, run.run_id, "CANCELLED", "Cancelled", "its process is gone")
            elif not run.may_resume:
                message = f"its process is gone; attempt {run.attempts}"
                _set_state(api, run.run_id, "CRASHED", "Crashed", message)
            else:
                _set_state(
                    api, run.run_id, "SCHEDULED", "AwaitingRetry", "goes on from what it has"
                )
                resumed.append(run.title)
    return resumed


def _under_way(api: httpx.Client, **other: Any) -> list[dict[str, Any]]:
    states = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    flow_runs = {**states, **other.pop("flow_runs", {})}
    answer = api.post("/flow_runs/filter", json={"flow_runs": flow_runs, **other})
    return answer.raise_for_status().json()


def _interrupted(run: dict[str, Any]) -> InterruptedRun:
    recipe = run["parameters"].get("recipe", "")
    attempts = run["run_count"]
    return InterruptedRun(
        run_id=run["id"],
        title=f"{run['name']} ({recipe})" if recipe else run["name"],
        state=run["state_type"],
        attempts=attempts,
        may_resume=AUTO_RESUME in run["tags"] and attempts < MAX_ATTEMPTS,
    )


def _end_below(api: httpx.Client, run_id: str) -> None:
    for child in _sub_flows(api, run_id):
        _end_below(api, child)
        _set_state(api, child, "CRASHED", "Crashed", "its process is gone")


def _sub_flows(api: httpx.Client, run_id: str) -> Iterator[str]:
    below = {"parent_flow_run_id": {"any_": [run_id]}}
    return (run["id"] for run in _under_way(api, flow_runs=below))


def _set_state(api: httpx.Client, run_id: str, kind: str, name: str, message: str) -> None:
    body = {"state": {"type": kind, "name": name, "message": message}, "force": True}
    api.post(f"/flow_runs/{run_id}/set_state", json=body).raise_for_status()


def _named(name: str) -> dict[str, Any]:
    return {"name": {"any_": [name]}}

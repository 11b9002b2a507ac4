"""Rows of workers, flow runs and concurrency leases, from the API of this machine's Prefect server."""

import json
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2

from ostinato.flows.operating.local_prefect import WORK_POOL
from ostinato.flows.operating.resuming import MAX_ATTEMPTS, count_attempts, states_of
from ostinato.flows.operating.status.processes import ProcessTable, say_stopped
from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds
from ostinato.flows.operating.status.services import WORKER, UpProcess
from ostinato.flows.stages.server_access import ask
from ostinato.infra.platform.cluster.processes import marked_processes

_AFTER_CRASH = ("Crashed", "AwaitingRetry")
_RECENT = timedelta(days=1)
_ACTIVE = ["RUNNING", "PENDING", "CANCELLING"]
_DEPLOYMENT_PREFIX = "deployment:"  # Prefect's prefix for the name of a deployment's limit
_WITHOUT_SLOT = "AwaitingConcurrencySlot"
_START_A_WORKER = "`ostinato up` or `prefect worker start --pool {}` starts one"


class PrefectRows:
    """Rows about a Prefect server, from a snapshot of its state."""

    def __init__(
        self,
        api: httpx2.Client,
        up: UpProcess,
        processes: ProcessTable,
        *,
        home: Path,
        now: float,
        thresholds: Thresholds,
    ) -> None:
        self._api, self._up, self._processes = api, up, processes
        self._home, self._now, self._thresholds = home, now, thresholds
        pools = ask(self._api, "work_pools/filter", {})
        self._pools = {pool["name"]: pool for pool in pools if pool["type"] == "process"}
        self._workers = {
            name: ask(self._api, f"work_pools/{name}/workers/filter", {}) for name in self._pools
        }
        self._active = self._runs(_ACTIVE)
        # Read after the runs, so that a run that starts in between is in neither. Stages inherit the variable.
        self._engines = marked_processes("PREFECT__FLOW_RUN_ID", "prefect.engine")

    def rows(self) -> Iterator[StatusRow]:
        """Rows of workers, of runs that are active, died before they started or are late, and of leaked leases."""
        for pool in self._pools:
            yield from self._worker_rows(pool)
        for run in self._active:
            yield self._active_row(run)
        scheduled = self._runs(["SCHEDULED"])
        for run in (*self._recently_crashed(), *scheduled):
            if run["run_count"] == 0 and run["state"]["name"] in _AFTER_CRASH:
                yield self._unstarted_row(run)
        for run in scheduled:
            due = _instant(run["expected_start_time"])
            if due is not None and self._now - due >= self._thresholds.late:
                yield self._late_row(run, due)
        yield from self._lease_rows()

    def _runs(self, states: list[str], **more: Any) -> list[dict[str, Any]]:
        wanted = {"flow_runs": {"state": {"type": {"any_": states}}, **more}}
        return ask(self._api, "flow_runs/filter", wanted)

    def _recently_crashed(self) -> list[dict[str, Any]]:
        since = datetime.fromtimestamp(self._now, tz=UTC) - _RECENT
        return self._runs(["CRASHED"], end_time={"after_": since.isoformat()})

    def _unstarted_row(self, run: Mapping[str, Any]) -> StatusRow:
        """Row of a run that ended before the flow's first line, with the last message of its process."""
        states = states_of(self._api, run["id"])
        crashes = [state for state in states if state["type"] == "CRASHED"]
        if not crashes:
            return StatusRow(part=_name(run), state=run["state_type"].lower())
        errors = {"logs": {"flow_run_id": {"any_": [run["id"]]}, "level": {"ge_": logging.ERROR}}}
        messages = [line["message"] for line in ask(self._api, "logs/filter", errors)]
        messages = messages or [crashes[-1]["message"] or "its process ended"]
        why = messages[-1].strip().splitlines()[-1]
        row = StatusRow(
            part=_name(run),
            state=run["state_type"].lower(),
            since=_instant(crashes[-1]["timestamp"]),
            progress=f"attempt {count_attempts(states)} of {MAX_ATTEMPTS}",
        )
        return row.changed(fault=Fault.STUCK_RUN, cause=f"it died before it started: {why[:300]}")

    def _online(self, pool: str) -> list[dict[str, Any]]:
        return [worker for worker in self._workers[pool] if worker["status"] == "ONLINE"]

    def _worker_rows(self, pool: str) -> Iterator[StatusRow]:
        if pool == WORK_POOL:
            stopped = self._up.stopped(WORKER)
            if stopped:
                yield _silent_worker(None, say_stopped(stopped))
                return
            dead = self._up.dead_row("worker", WORKER)
            if dead is not None:
                yield dead
                return
            if not self._online(pool) and self._up.is_starting(WORKER, self._now):
                yield StatusRow(part="worker", state="starting")
                return
        for worker in self._online(pool):
            beat = _instant(worker["last_heartbeat_time"])
            since = _instant(worker.get("created"))
            seen = "" if beat is None else f"heartbeat {max(0.0, self._now - beat):.0f} s ago"
            yield StatusRow(part="worker", state="up", since=since, progress=seen)
        if self._online(pool):
            return
        start = _START_A_WORKER.format(pool)
        # an ended worker matters only when no other has replaced it
        newest = max(
            self._workers[pool], key=lambda item: item["last_heartbeat_time"] or "", default=None
        )
        if newest is None:
            yield StatusRow(part="worker", state="not running", waits_for=start)
        else:
            cause = f"no heartbeat of the worker of pool {pool}: it ended or hangs; {start}"
            yield _silent_worker(_instant(newest["last_heartbeat_time"]), cause)

    def _active_row(self, run: Mapping[str, Any]) -> StatusRow:
        state, since = run["state_type"], _instant(run["state"]["timestamp"])
        row = StatusRow(part=_name(run), state=state.lower(), since=since)
        pids = self._engines.get(run["id"].replace("-", ""), [])
        stopped = self._processes.stopped(pids)
        if stopped:
            return row.changed(fault=Fault.STOPPED_PROCESS, cause=say_stopped(stopped))
        if run["deployment_id"] is None or pids:  # without a deployment it may run anywhere
            return row
        if state == "RUNNING" and not self._has_ended(run):
            cause = "no process of this machine runs it; `ostinato up` resumes it"
            return row.changed(fault=Fault.LOST_RUN, cause=cause)
        if state == "PENDING" and self._now - (since or self._now) >= self._thresholds.pending:
            log = self._home / "logs" / "prefect-worker.log"
            cause = f"a worker took it and its process did not start; see {log}"
            return row.changed(fault=Fault.STUCK_RUN, cause=cause)
        return row

    def _has_ended(self, run: Mapping[str, Any]) -> bool:
        """Whether the run's state has changed: its process may have ended since the runs were listed."""
        now = self._api.get(f"flow_runs/{run['id']}").raise_for_status().json()
        return now["state_type"] != run["state_type"]

    def _late_row(self, run: Mapping[str, Any], due: float) -> StatusRow:
        pool, queue = run["work_pool_name"], run["work_queue_name"]
        row = StatusRow(part=_name(run), state="late", since=due)
        if run["state"]["name"] == _WITHOUT_SLOT:
            return row.changed(state="queued", waits_for="a slot of its deployment")
        if pool not in self._pools:
            return row.changed(waits_for=f"a worker of pool {pool}")
        queues = ask(self._api, f"work_pools/{pool}/queues/filter", {})
        found = next((item for item in queues if item["name"] == queue), None)
        if self._pools[pool]["is_paused"] or (found is not None and found["is_paused"]):
            cause = f"work queue {queue} of pool {pool} is paused: resume it in the UI"
            return row.changed(waits_for=f"queue {queue}", fault=Fault.LATE_RUN, cause=cause)
        limit = found["concurrency_limit"] if found is not None else None
        ahead = [item["name"] for item in self._active if item["work_queue_name"] == queue]
        if limit is not None and len(ahead) >= limit:
            waits_for = f"queue {queue}, which runs {limit} at a time: {', '.join(ahead)}"
            return row.changed(state="queued", waits_for=waits_for)
        if not self._online(pool):
            cause = f"pool {pool} has no worker; {_START_A_WORKER.format(pool)}"
            return row.changed(waits_for="a worker", fault=Fault.LATE_RUN, cause=cause)
        cause = f"the worker of pool {pool} does not take it; see its log"
        return row.changed(waits_for="a worker", fault=Fault.LATE_RUN, cause=cause)

    def _lease_rows(self) -> Iterator[StatusRow]:
        for limit in ask(self._api, "v2/concurrency_limits/filter", {}):
            if not limit["name"].startswith(_DEPLOYMENT_PREFIX):
                continue
            identity = limit["name"].removeprefix(_DEPLOYMENT_PREFIX)
            holders = [run for run in self._active if run["deployment_id"] == identity]
            num_leaked = limit["active_slots"] - len(holders)
            since = self._lease_since(limit["id"]) or _instant(limit["updated"])
            if num_leaked <= 0 or self._now - (since or self._now) < self._thresholds.lease:
                continue
            answer = self._api.get(f"deployments/{identity}")
            name = answer.json()["name"] if answer.is_success else identity
            cause = (
                f"{num_leaked} of {limit['limit']} slots are taken although no run holds "
                "them: wait for the end of the lease, or set the limit's active slots to 0"
            )
            yield StatusRow(
                part=f"lease {name}",
                state="leaked",
                waits_for="the end of the lease",
                since=since,
                fault=Fault.LEAKED_LEASE,
                cause=cause,
            )

    def _lease_since(self, limit_id: str) -> float | None:
        """Creation time of a limit's oldest lease, from the files of `ostinato up`'s server."""
        instants = []
        for path in (self._home / "prefect" / "concurrency_leases").glob("*-*.json"):
            try:
                lease = json.loads(path.read_text())
            except (OSError, ValueError):  # the lease ended meanwhile
                continue
            if limit_id in lease["resource_ids"]:
                instants.append(_instant(lease["created_at"]))
        return min((instant for instant in instants if instant is not None), default=None)


def _name(run: Mapping[str, Any]) -> str:
    return f"flow run {run['name']}"


def _silent_worker(since: float | None, cause: str) -> StatusRow:
    return StatusRow(
        part="worker", state="silent", since=since, fault=Fault.SILENT_WORKER, cause=cause
    )


def _instant(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()

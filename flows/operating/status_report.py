"""Rows of `ostinato status`: each part of this machine, its state, what it waits for, since when, and the likely cause."""

import contextlib
import json
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from pydantic import Field

from ostinato.infra.platform.cluster.processes import is_alive, is_elsewhere, told_processes
from ostinato.infra.platform.cluster.workspace import (
    FAILURE,
    HEARTBEAT,
    PROCESS,
    PROGRESS,
    PUBLISHED,
    RESULT,
    STATUS,
    Failure,
    ProcessMark,
    Progress,
    read_record,
)
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings

_PROBE_SECONDS = 4.0  # longest that one part may take to answer
_SILENT_SECONDS = 30.0  # of heartbeat; a child beats every five
_LATE_SECONDS = 60.0  # after its time, before a scheduled run is called late
_UNDER_WAY = ["RUNNING", "PENDING", "CANCELLING", "SCHEDULED"]


class StatusRow(Record):
    """State of one part."""

    part: str
    state: str
    waits_for: str = ""
    since: float | None = Field(default=None, description="seconds since the epoch; None: unknown")
    cause: str = Field(default="", description="likely; empty when nothing is wrong")
    progress: str = ""


def collect(settings: Settings) -> list[StatusRow]:
    """Every part of this machine: services, storage, cycles, flow runs, then stages, newest last."""
    api = f"http://127.0.0.1:{settings.prefect_port}/api/"
    gateway = f"http://127.0.0.1:{settings.gateway_port}/healthz"
    rows = [_service("server", f"{api}health"), _service("gateway", gateway)]
    if rows[0].state == "up":
        rows += _probed("flow runs", lambda: list(_flow_runs(api)))
    rows += _probed("disk", lambda: [_disk(settings)])
    rows += _probed("ledger", lambda: list(_ledger(settings)))
    rows += _probed("store", lambda: [_store(settings)])
    stages = (path for path in (settings.home / "runs").glob("*/*") if path.is_dir())
    for directory in sorted(stages, key=lambda path: path.stat().st_mtime):
        rows += _stage_rows(directory)
    return rows


def ago(instant: float | None, now: float) -> str:
    """How long ago, in words."""
    if instant is None:
        return ""
    seconds = max(0.0, now - instant)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _probed(part: str, probe: Callable[[], list[StatusRow]]) -> list[StatusRow]:
    """Rows of a part; one row that says so when it does not answer in time, or fails."""
    began = time.time()
    rows: list[StatusRow] = []

    def run() -> None:
        try:
            rows.extend(probe())
        except (OstinatoError, OSError, httpx.HTTPError, sqlite3.Error) as error:
            rows.append(StatusRow(part=part, state="failing", since=began, cause=_line(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if thread.is_alive():
        cause = f"no answer within {_PROBE_SECONDS:.0f} s: locked, or its network or disk is slow"
        return [StatusRow(part=part, state="silent", since=began, cause=cause)]
    return rows


def _service(part: str, url: str) -> StatusRow:
    port = urlsplit(url).port or 0
    with contextlib.suppress(httpx.HTTPError):
        if httpx.get(url, timeout=2.0).is_success:
            return StatusRow(part=part, state="up", since=_listening_since(port))
    with socket.socket() as probe:
        probe.settimeout(0.5)
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return StatusRow(part=part, state="not running")
    cause = f"port {port} is open and does not answer: stopped, overloaded or another program"
    return StatusRow(part=part, state="silent", since=_listening_since(port), cause=cause)


def _listening_since(port: int) -> float | None:
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr[1:2] == (port,) and found.pid:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(found.pid).create_time()
    return None


def _flow_runs(api: str) -> Iterator[StatusRow]:
    with httpx.Client(base_url=api, timeout=_PROBE_SECONDS) as client:
        pools = client.post("work_pools/filter", json={}).raise_for_status().json()
        for pool in (pool for pool in pools if pool["type"] == "process"):
            url = f"work_pools/{pool['name']}/workers/filter"
            workers = client.post(url, json={}).raise_for_status().json()
            up = [worker for worker in workers if worker["status"] == "ONLINE"]
            # one that ended is of interest only where no other took its place
            newest = sorted(workers, key=lambda worker: worker["last_heartbeat_time"] or "")[-1:]
            for worker in up or newest:
                yield _worker(worker)
            if not workers:
                cause = "`ostinato up` starts one, `prefect worker start` too"
                yield StatusRow(part="worker", state="not running", cause=cause)
        wanted = {"flow_runs": {"state": {"type": {"any_": _UNDER_WAY}}}}
        runs = client.post("flow_runs/filter", json=wanted).raise_for_status().json()
    engines = told_processes("PREFECT__FLOW_RUN_ID")
    for run in runs:
        row = _flow_run(run, engines)
        if row is not None:
            yield row


def _worker(worker: dict[str, Any]) -> StatusRow:
    is_up = worker["status"] == "ONLINE"
    cause = "" if is_up else "no heartbeat; `ostinato up` starts one, `prefect worker start` too"
    beat = _instant(worker["last_heartbeat_time"])
    return StatusRow(part="worker", state="up" if is_up else "silent", since=beat, cause=cause)


def _flow_run(run: dict[str, Any], engines: set[str]) -> StatusRow | None:
    """None for a run that is planned for later."""
    state, part = run["state_type"], f"flow run {run['name']}"
    since = _instant(run["state"]["timestamp"])
    if state == "SCHEDULED":
        due = _instant(run["expected_start_time"])
        if due is None or time.time() - due < _LATE_SECONDS:
            return None
        cause = "no worker takes it, or its queue is at its limit"
        return StatusRow(part=part, state="late", waits_for="a worker", since=due, cause=cause)
    is_lost = run["deployment_id"] is not None and run["id"] not in engines
    cause = "no process of this machine runs it; `ostinato up` takes it up again" if is_lost else ""
    return StatusRow(part=part, state=state.lower(), since=since, cause=cause)


def _instant(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _disk(settings: Settings) -> StatusRow:
    place = next(path for path in (settings.home, *settings.home.parents) if path.exists())
    free = psutil.disk_usage(str(place)).free
    seen = f"{free / 2**30:.1f} GiB free"
    if free >= settings.minimum_free_disk_bytes:
        return StatusRow(part="disk", state="up", progress=seen)
    wanted = f"{settings.minimum_free_disk_bytes / 2**30:.1f}"
    cause = f"{seen} at {place}, wanted {wanted}: remove old runs, or set OSTINATO_HOME"
    return StatusRow(part="disk", state="full", waits_for="room", cause=cause)


def _ledger(settings: Settings) -> Iterator[StatusRow]:
    with contextlib.closing(open_ledger(settings)) as ledger:
        path = urlsplit(settings.ledger_url).path.removeprefix("/")
        if settings.ledger_url.startswith("sqlite"):
            with contextlib.closing(sqlite3.connect(path, timeout=1.0)) as database:
                try:
                    database.execute("BEGIN IMMEDIATE")
                    database.rollback()
                except sqlite3.OperationalError as error:
                    cause = f"{error}: another process writes and does not end, see `lsof {path}`"
                    yield StatusRow(
                        part="ledger", state="locked", waits_for="its lock", cause=cause
                    )
                    return
        yield StatusRow(part="ledger", state="up")
        for line in ledger.promotions.lines():
            cycle = ledger.cycles.open_cycle(line)
            if cycle is not None:
                yield StatusRow(
                    part=f"cycle {cycle.cycle_id}",
                    state="open",
                    waits_for="the next run of realtime-cycle",
                    since=cycle.opened_at,
                )


def _store(settings: Settings) -> StatusRow:
    open_object_store(settings).exists("status")
    return StatusRow(part="store", state="up")


def _stage_rows(directory: Path) -> list[StatusRow]:
    part = f"{directory.parent.name} {directory.name}"
    progress = read_record(directory / PROGRESS, Progress)
    seen = f"{progress.done:g}/{progress.total:g} {progress.message}" if progress else ""
    since = progress.at if progress else None
    for name in (PUBLISHED, RESULT):
        if (directory / name).is_file():
            return [_row(part, "finished", since=(directory / name).stat().st_mtime)]
    mark = read_record(directory / PROCESS, ProcessMark)
    failure = read_record(directory / FAILURE, Failure)
    if failure is not None:
        at = (directory / FAILURE).stat().st_mtime
        return [_row(part, "failed", since=at, cause=_line(failure.message), progress=seen)]
    if mark is None:
        return [_row(part, "not started", waits_for="the same command", progress=seen)]
    if is_elsewhere(mark):
        return [_row(part, f"on host {mark.host}", since=since, progress=seen)]
    if not is_alive(mark):
        return [
            _row(part, "stopped", waits_for="the same command again", since=since, progress=seen)
        ]
    cause = _standstill(directory, mark)
    if cause:
        beat = (directory / HEARTBEAT).stat().st_mtime if (directory / HEARTBEAT).exists() else None
        return [_row(part, "stands still", since=beat, cause=cause, progress=seen)]
    waits = list(_waits(directory / STATUS, part, seen))
    return waits or [_row(part, "running", since=mark.started_at, progress=seen)]


def _row(part: str, state: str, **others: Any) -> StatusRow:
    return StatusRow(part=part, state=state, **others)


def _standstill(directory: Path, mark: ProcessMark) -> str:
    """Why a live child does nothing. Empty when it does."""
    stopped = []
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(mark.pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.append(str(process.pid))
    if stopped:
        pids = " ".join(stopped)
        return f"process {pids} is stopped by a signal; `kill -CONT {pids}` lets it go on"
    beat = directory / HEARTBEAT
    silent_seconds = time.time() - beat.stat().st_mtime if beat.exists() else 0.0
    if silent_seconds > _SILENT_SECONDS:
        return f"no heartbeat for {silent_seconds:.0f} s: blocked in one call, or out of memory"
    return ""


def _waits(path: Path, part: str, progress: str) -> Iterator[StatusRow]:
    if path.is_file():
        for name, wait in json.loads(path.read_text())["waits"].items():
            what = f"{wait['for']} ({wait['detail']})"
            yield StatusRow(
                part=f"{part} {name}",
                state="running",
                waits_for=what,
                since=wait["since"],
                progress=progress,
            )


def _line(error: object) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

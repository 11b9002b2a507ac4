"""Rows of `ostinato up` and its services, of the Prefect server and of the gateway."""

import socket
from urllib.parse import urlsplit

import httpx
import psutil

from ostinato.flows.operating.status.processes import ProcessTable, say_stopped
from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds
from ostinato.flows.operating.up import UP_FILE, ServiceState, UpState
from ostinato.flows.stages.server_access import is_own_server, listener
from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.workspace import read_record
from ostinato.infra.platform.settings import Settings

SERVER, WORKER, GATEWAY = "prefect-server", "prefect-worker", "gateway"
_STARTING_SECONDS = 90.0  # until a service of `up` listens, or a worker is known to the server


class RunningUp:
    """The `ostinato up` of a home, as its file and the process table tell."""

    def __init__(self, settings: Settings, processes: ProcessTable) -> None:
        self._path = settings.home / UP_FILE
        self.state = read_record(self._path, UpState)
        self.is_alive = self.state is not None and is_alive(self.state.process)
        self._processes = processes

    def rows(self) -> list[StatusRow]:
        """The row of `up` itself. None where it was ended as it should, or never started."""
        if self.state is None:
            return []
        pid = self.state.process.pid
        if not self.is_alive:
            cause = f"process {pid} was killed; `ostinato up` starts again and takes over"
            return [_dead("up", None, cause)]
        if self._processes.stopped([pid]):
            cause = say_stopped([pid])
            return [
                StatusRow(part="up", state="stands still", fault=Fault.DEAD_SERVICE, cause=cause)
            ]
        return [
            StatusRow(
                part="up", state="up", since=self.state.since, progress=str(self.state.recipe)
            )
        ]

    def service(self, name: str) -> ServiceState | None:
        """A service of an `up` that lives."""
        services = self.state.services if self.state is not None and self.is_alive else ()
        return next((item for item in services if item.name == name), None)

    def dead_row(self, part: str, name: str) -> StatusRow | None:
        """The row of a service that died, or whose process is stopped. None when it works."""
        service = self.service(name)
        if service is None:
            return None
        if service.process is None or not is_alive(service.process):
            cause = service.cause or f"its process ended, log {service.log}"
            since = service.since if service.process is None else None
            return _dead(part, since, f"{cause}; `ostinato up` starts it again")
        return None

    def stopped(self, name: str) -> list[int]:
        """Processes of a service that a signal stopped."""
        service = self.service(name)
        if service is None or service.process is None:
            return []
        return self._processes.stopped(self._processes.family(service.process.pid))

    def is_starting(self, name: str, now: float) -> bool:
        """Whether a service began a moment ago."""
        service = self.service(name)
        return service is not None and now - service.since < _STARTING_SECONDS


def server_row(up: RunningUp, settings: Settings, now: float, thresholds: Thresholds) -> StatusRow:
    """State of the home's Prefect server. Another program on its port is none."""
    port = settings.prefect_port
    url = f"http://127.0.0.1:{port}/api/health"
    row = _listening_row("server", url, Fault.SILENT_SERVER, thresholds)
    if row is not None and is_own_server(port, settings.home):
        return row
    if row is not None:
        cause = (
            f"port {port} is taken by {_name_listener(port)}, which is no Prefect server of this home; end it, or "
            "set OSTINATO_PREFECT_PORT"
        )
        return StatusRow(part="server", state="not running", waits_for=f"port {port}", cause=cause)
    starting = StatusRow(part="server", state="starting")
    if up.is_starting(SERVER, now):
        return starting
    return up.dead_row("server", SERVER) or StatusRow(part="server", state="not running")


def gateway_row(up: RunningUp, url: str, thresholds: Thresholds) -> StatusRow:
    """State of the gateway of this machine. It listens once its line has a checkpoint."""
    row = _listening_row("gateway", url, Fault.SILENT_GATEWAY, thresholds)
    if row is not None:
        return row
    service = up.service(GATEWAY)
    if service is None:
        return StatusRow(part="gateway", state="not running")
    stopped = up.stopped(GATEWAY)
    if stopped:
        cause = say_stopped(stopped)
        return StatusRow(part="gateway", state="silent", fault=Fault.SILENT_GATEWAY, cause=cause)
    waiting = StatusRow(
        part="gateway",
        state="waiting",
        waits_for="its engine, or a checkpoint that passed its gate",
        since=service.since,
    )
    return up.dead_row("gateway", GATEWAY) or waiting


def _listening_row(part: str, url: str, fault: Fault, limits: Thresholds) -> StatusRow | None:
    """None when nobody listens on the url's port."""
    port = urlsplit(url).port or 0
    with socket.socket() as probe:
        probe.settimeout(0.5)
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return None
    process = listener(port)
    since = process.create_time() if process is not None else None
    who = _name_listener(port)
    if process is not None and process.status() == psutil.STATUS_STOPPED:
        cause = say_stopped([process.pid])
        return StatusRow(part=part, state="silent", fault=fault, cause=cause)
    try:
        status = httpx.get(url, timeout=limits.answer).status_code
    except httpx.HTTPError as error:
        seen = type(error).__name__
        cause = f"port {port} is open and {who} does not answer ({seen}): overloaded, or hung"
        return StatusRow(part=part, state="silent", fault=fault, cause=cause)
    if status == httpx.codes.OK:
        return StatusRow(part=part, state="up", since=since)
    cause = f"{who} answers {status} on port {port}, wanted 200: see its log, or it is not ours"
    return StatusRow(part=part, state="failing", fault=fault, cause=cause)


def _name_listener(port: int) -> str:
    process = listener(port)
    return "another program" if process is None else f"process {process.pid}"


def _dead(part: str, since: float | None, cause: str) -> StatusRow:
    return StatusRow(part=part, state="dead", since=since, fault=Fault.DEAD_SERVICE, cause=cause)

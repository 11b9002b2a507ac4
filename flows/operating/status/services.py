"""Rows of `ostinato up` and its services, the Prefect server, the gateway, the disk and the object store."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2
import psutil

from ostinato.flows.operating.status.processes import ProcessTable, say_stopped
from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds, first_line
from ostinato.flows.operating.up import UP_FILE, ServiceState, UpState
from ostinato.flows.stages.server_access import is_own_server, listener
from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.workspace import read_record
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import CHAINS, MANIFEST, parse_file_key

SERVER, WORKER, GATEWAY = "prefect-server", "prefect-worker", "gateway"
_STARTING_SECONDS = 90.0  # time for a service of `up` to listen, or for a worker to register


class UpProcess:
    """The `ostinato up` of a home, from its file and the process table."""

    def __init__(self, settings: Settings, processes: ProcessTable) -> None:
        self._path = settings.home / UP_FILE
        self.state = read_record(self._path, UpState)
        self.is_alive = self.state is not None and is_alive(self.state.process)
        self._processes = processes

    def rows(self) -> list[StatusRow]:
        """The row of `up` itself. Empty when it was shut down properly, or never started."""
        if self.state is None:
            return []
        pid = self.state.process.pid
        if not self.is_alive:
            cause = f"process {pid} was killed; `ostinato up` starts again and takes over"
            return [_dead("up", None, cause)]
        if self._processes.stopped([pid]):
            row = StatusRow(part="up", state="halted", fault=Fault.DEAD_SERVICE)
            return [row.changed(cause=say_stopped([pid]))]
        recipe = str(self.state.recipe)
        return [StatusRow(part="up", state="up", since=self.state.since, progress=recipe)]

    def service(self, name: str) -> ServiceState | None:
        """A service of the running `up`. None without one."""
        services = self.state.services if self.state is not None and self.is_alive else ()
        return next((item for item in services if item.name == name), None)

    def dead_row(self, part: str, name: str) -> StatusRow | None:
        """The row of a service that died. None when it lives, or is not a service of the running `up`."""
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
        """Whether a service started so recently that it may not answer yet."""
        service = self.service(name)
        return service is not None and now - service.since < _STARTING_SECONDS


def server_row(up: UpProcess, settings: Settings, now: float, thresholds: Thresholds) -> StatusRow:
    """State of the home's Prefect server. Another program on its port does not count."""
    port = settings.prefect_port
    url = f"http://127.0.0.1:{port}/api/health"
    row = _listening_row("server", url, Fault.SILENT_SERVER, thresholds)
    if row is not None and is_own_server(port, settings.home):
        return row
    if row is not None:
        cause = (
            f"port {port} is taken by {_name_listener(port)}, which is not this home's Prefect server; end it, or "
            "set OSTINATO_PREFECT_PORT"
        )
        return StatusRow(part="server", state="not running", waits_for=f"port {port}", cause=cause)
    starting = StatusRow(part="server", state="starting")
    if up.is_starting(SERVER, now):
        return starting
    return up.dead_row("server", SERVER) or StatusRow(part="server", state="not running")


def gateway_row(up: UpProcess, url: str, thresholds: Thresholds) -> StatusRow:
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
    """State of the service at a URL. None when nothing listens on its port."""
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
        status = httpx2.get(url, timeout=limits.answer).status_code
    except httpx2.HTTPError as error:
        seen = type(error).__name__
        cause = f"port {port} is open and {who} does not answer ({seen}): overloaded, or hung"
        return StatusRow(part=part, state="silent", fault=fault, cause=cause)
    if status == httpx2.codes.OK:
        return StatusRow(part=part, state="up", since=since)
    cause = f"{who} answers {status} on port {port}, wanted 200: see its log, or it is not ours"
    return StatusRow(part=part, state="failing", fault=fault, cause=cause)


def _name_listener(port: int) -> str:
    process = listener(port)
    return "another program" if process is None else f"process {process.pid}"


def _dead(part: str, since: float | None, cause: str) -> StatusRow:
    return StatusRow(part=part, state="dead", since=since, fault=Fault.DEAD_SERVICE, cause=cause)


def disk_row(settings: Settings) -> StatusRow:
    """Free space on the home's disk."""
    place = _nearest(settings.home)
    free = psutil.disk_usage(str(place)).free
    seen = f"{free / 2**30:.1f} GiB free"
    if free >= settings.minimum_free_disk_bytes:
        return StatusRow(part="disk", state="up", progress=seen)
    wanted = f"{settings.minimum_free_disk_bytes / 2**30:.1f}"
    cause = f"{seen} at {place}, wanted {wanted}: run `ostinato gc`, or move OSTINATO_HOME"
    row = StatusRow(part="disk", state="full", waits_for="room")
    return row.changed(fault=Fault.FULL_DISK, cause=cause)


def store_row(settings: Settings, thresholds: Thresholds) -> StatusRow:
    """State of the object store, by whether it answers and how fast."""
    refused = _refused_folder(settings.object_store_url)
    if refused:
        return _unusable(refused)
    began = time.monotonic()
    try:
        open_object_store(settings).exists("status")
    except OstinatoError as error:
        return _unusable(first_line(error))
    seconds = time.monotonic() - began
    if seconds > thresholds.slow:
        return slow_store(f"an answer took {seconds:.1f} s: its network or disk is slow")
    return StatusRow(part="store", state="up")


def slow_store(cause: str) -> StatusRow:
    """Row of a store that answers late or not at all."""
    return StatusRow(part="store", state="slow", fault=Fault.SLOW_STORE, cause=cause)


def upload_rows(objects: ObjectStore, now: float, thresholds: Thresholds) -> Iterator[StatusRow]:
    """Weight versions newer than their chain's last committed one that have not grown for a while. A version
    is committed by its manifest, which is written last.
    """
    parts: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for key, changed_at in objects.changed_at(CHAINS).items():
        found = parse_file_key(key)
        if found is not None:
            chain, version, name = found
            parts[chain, version][name] = changed_at
    committed: dict[str, int] = defaultdict(lambda: -1)
    for (chain, version), names in parts.items():
        if MANIFEST in names:
            committed[chain] = max(committed[chain], version)
    for (chain, version), names in sorted(parts.items()):
        since = max(names.values())
        if version <= committed[chain] or now - since < thresholds.upload:
            continue
        cause = (
            f"{len(names)} payloads are in the store without its manifest: its publisher hangs, or "
            "was killed and has not resumed"
        )
        yield StatusRow(
            part=f"{chain} version {version}",
            state="half uploaded",
            waits_for="its manifest",
            since=since,
            fault=Fault.WEDGED_UPLOAD,
            cause=cause,
        )


def _refused_folder(url: str) -> str:
    """Why a folder cannot be a store. Empty when it can, or when the store is not a folder."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return ""
    place = _nearest(Path(unquote(parts.path)))
    if not place.is_dir():
        return f"{place} is a file, wanted a folder; check OSTINATO_OBJECT_STORE_URL"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not writable, wanted a writable folder; check its owner"
    return ""


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _unusable(cause: str) -> StatusRow:
    return StatusRow(part="store", state="failing", fault=Fault.UNUSABLE_STORE, cause=cause)

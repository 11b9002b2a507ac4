"""Starts long-lived programs of this machine together and ends them together.

`Service` (one program: command, environment, log, readiness probe) and `ServiceGroup` (a context
manager over several). `ServiceGroup.mend` restarts dead services, with a delay that doubles with each early death.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx2
import psutil

from ostinato.infra.platform.cluster.processes import END_SIGNALS, undisturbed
from ostinato.infra.platform.errors import ClusterError, ConfigError
from ostinato.infra.platform.telemetry import log_tail

_FOREGROUND_END_SECONDS = 13.0
_STOP_SECONDS = 10.0
_SETTLED_SECONDS = 60.0  # a death after this uptime resets the count of early deaths
_LONGEST_WAIT_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def interrupt_on_signals() -> None:
    """Makes SIGINT, SIGTERM and SIGHUP a KeyboardInterrupt of this process. This includes an ignored SIGINT, which
    programs inherit from a shell that starts them in the background, but not an ignored SIGHUP, which is the user's
    wish (nohup).
    """
    for number in END_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def run_foreground(
    command: Sequence[str],
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Runs a program to its end, and `meanwhile` while it starts. Returns the exit code. A KeyboardInterrupt here or
    an error of `meanwhile` interrupts the program, kills it and its descendants if it does not end in time, and
    propagates.
    """
    process = _start(command, environment, None)
    try:
        meanwhile()
        return process.wait()
    except BaseException:
        with undisturbed():  # a second interrupt would not end it sooner
            _end_foreground(process)
        raise


def _end_foreground(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_FOREGROUND_END_SECONDS)
    except subprocess.TimeoutExpired:
        family = psutil.Process(process.pid).children(recursive=True)
        for member in (*family, process):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                member.kill()
        process.wait()


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """A process in its own session, which gets SIGTERM when this process ends, even by SIGKILL."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )


def require_free_port(port: int, purpose: str) -> None:
    """Raises ConfigError when something already listens on the port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(
                f"port for {purpose} is busy: {port} is already listened on, wanted a free port; "
                f"stop that program or set another port (see `ostinato doctor`)"
            )


def find_free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url: str) -> bool:
    """Whether a GET of the url succeeds."""
    try:
        return httpx2.get(url, timeout=2.0).is_success
    except httpx2.HTTPError:
        return False


@dataclass(frozen=True)
class Service:
    """One program to keep running."""

    name: str
    command: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ready: Callable[[], bool] = lambda: True
    ready_within_seconds: float = 300.0  # for a busy machine; a death is noticed at once


@dataclass
class RunningService:
    """A service, its process, and its restarts."""

    service: Service
    process: subprocess.Popen[bytes]
    since: float
    restarts: int = 0
    deaths: int = 0  # in a row, each within the first minute
    starts_at: float | None = None  # time of the next start, after a death
    ended_at: float | None = None  # time when the death was noticed
    cause: str = ""  # of the last death


class ServiceGroup(AbstractContextManager["ServiceGroup"]):
    """Runs services from first to last and ends them from last to first."""

    def __init__(self) -> None:
        self.running: list[RunningService] = []

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            self.stop()

    def launch(self, service: Service) -> RunningService:
        """Starts a service without waiting for it."""
        running = RunningService(service, _launch(service), time.time())
        self.running.append(running)
        return running

    def start(self, service: Service) -> None:
        """Starts a service and waits until it is ready. ClusterError when it dies or stays silent."""
        await_ready(self.launch(service))

    def mend(self, now: float) -> list[RunningService]:
        """Restarts dead services, each after its delay. Returns the services that changed."""
        return [running for running in self.running if _mend(running, now)]

    def stop(self, names: Collection[str] | None = None, *, at_once: bool = False) -> None:
        """Ends all process groups, or those of `names`: SIGTERM, wait, SIGKILL. `at_once`: only SIGKILL."""
        going = [item for item in self.running if names is None or item.service.name in names]
        for running in reversed(going):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL if at_once else signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for running in reversed(going):
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
            self.running.remove(running)


def await_ready(running: RunningService) -> None:
    """Waits until a service is ready. ClusterError when it dies or stays silent."""
    service = running.service
    deadline = time.monotonic() + service.ready_within_seconds
    while not service.is_ready():
        code = running.process.poll()
        if code is not None:
            raise ClusterError(
                f"service {service.name} ended with code {code}, wanted it to keep running"
                f"{log_tail(service.log_path)}"
            )
        if time.monotonic() > deadline:
            raise ClusterError(
                f"service {service.name} not ready after {service.ready_within_seconds:.0f} s"
                f"{log_tail(service.log_path)}"
            )
        time.sleep(0.1)


def _mend(running: RunningService, now: float) -> bool:
    """Notes a death, or restarts a dead service after its delay. Returns whether either happened."""
    if running.starts_at is not None:
        if now < running.starts_at:
            return False
        running.process, running.since = _launch(running.service), now
        running.starts_at = running.ended_at = None
        running.restarts += 1
        return True
    code = running.process.poll()
    if code is None:
        return False
    running.deaths = running.deaths + 1 if now - running.since < _SETTLED_SECONDS else 0
    running.ended_at = now
    running.starts_at = now + min(_LONGEST_WAIT_SECONDS, 2.0**running.deaths)
    running.cause = f"ended with code {code}, log {running.service.log_path}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)  # remaining processes may hold its port
    return True


def _launch(service: Service) -> subprocess.Popen[bytes]:
    service.log_path.parent.mkdir(parents=True, exist_ok=True)
    with service.log_path.open("ab") as log:
        return _start(service.command, service.environment, log)

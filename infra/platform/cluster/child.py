"""Runs heavy work in a supervised child process, which is ended together with its whole session.

If the directory already holds the result of the same request, nothing runs. If a child of the request is still alive
(its supervisor was killed), that child is watched and no second child starts. A child without supervisors ends itself
after `outlive_seconds`.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ostinato.infra.platform.cluster.processes import (
    is_alive,
    is_elsewhere,
    is_ending,
    kill_session,
    live_owners,
    mark_process,
    undisturbed,
)
from ostinato.infra.platform.cluster.workspace import (
    ALONE,
    ENDING,
    EXIT_LOCKED,
    FAILURE,
    HEARTBEAT,
    LOCK,
    LOG,
    OWNERS,
    PROCESS,
    PROGRESS,
    REQUEST,
    RESULT,
    START_LOCK,
    STATUS,
    Ending,
    Failure,
    ProcessMark,
    Progress,
    RequestEnvelope,
    ResultEnvelope,
    make_envelope,
    read_record,
    replace_text,
)
from ostinato.infra.platform.errors import ERROR_TYPES, ClusterError, StorageError, boundary
from ostinato.infra.platform.folders import locked
from ostinato.infra.platform.settings import Settings, load_launch, load_settings
from ostinato.infra.platform.telemetry import fields, log_tail

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_MARK_WAIT_SECONDS = 20.0
_NESTED_GRACE_SECONDS = 4.0  # this process itself has eight seconds to end
_OUTLIVE_SECONDS = 10.0
_SILENCE_SECONDS = 12.0  # more than twice the pause between two heartbeats of a child
_FULL_DISK_BYTES = 64 * 1024
# without the MALLOC variables, torch's CPU allocator returns large blocks to the kernel after each step
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}

R = TypeVar("R", bound=BaseModel)
OnProgress = Callable[[Progress], None]


def run_child(
    entry: str,
    request: BaseModel,
    result_type: type[R],
    *,
    directory: Path,
    on_progress: OnProgress | None = None,
    check: Callable[[], None] = lambda: None,
    settings: Settings | None = None,
    alone: bool = False,
    outlive_seconds: float = _OUTLIVE_SECONDS,
) -> R:
    """Runs `entry(request, workspace)` in a child and returns its result. Another call resumes interrupted work.

    Raises the child's own typed error, or ClusterError when the child was killed. An exception in the caller,
    including KeyboardInterrupt and errors of `check`, which is called while it waits, ends the child's whole session
    before it propagates, unless another supervisor waits for the same child. `alone`: the child holds the lock of the
    machine's device while it works, as trainers do. `outlive_seconds`: time after which a child ends itself when all
    its supervisors were killed.
    """
    directory = directory.absolute()
    with boundary(StorageError, f"making {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    envelope = make_envelope(entry, request)
    done = _finished(directory, envelope, result_type)
    if done is not None:
        return done
    settings = settings or load_settings()
    order = _Order(directory, envelope, child_environment(settings), alone, outlive_seconds)
    owner = directory / OWNERS / uuid.uuid4().hex
    while True:
        with boundary(StorageError, f"starting a child in {directory}"):
            child = _attach_or_start(order, owner)
        try:
            exit_code = _watch(child, on_progress, check, _Heartbeat(directory, settings))
        except BaseException as error:
            with undisturbed():
                _give_up(child, directory, owner, error)
            raise
        owner.unlink(missing_ok=True)
        # a child that died by a signal may leave its own children behind
        child.kill()
        done = _finished(directory, envelope, result_type)
        if done is not None:
            return done
        if not child.was_orphan and (child.process is not None or (directory / FAILURE).exists()):
            raise _error(entry, directory, exit_code)
        # The child was found, not started here: it was dying already, or failed from the cause that killed
        # its supervisor (such as the loss of a machine). The next iteration starts a new child.


@dataclass(frozen=True)
class _Order:
    """A request and the start options of its child."""

    directory: Path
    envelope: RequestEnvelope
    environment: Mapping[str, str]
    alone: bool
    outlive_seconds: float


@dataclass
class _Child:
    """A running child. `process` is None when an earlier supervisor started it.

    `was_orphan`: no live supervisor waited for it when it was found.
    """

    mark: ProcessMark
    process: subprocess.Popen[bytes] | None = None
    was_orphan: bool = False

    def exit_code(self) -> int | None:
        """None while it runs. -1 once a child of another supervisor has ended."""
        if self.process is not None:
            return self.process.poll()
        return None if is_alive(self.mark) else -1

    def kill(self) -> None:
        """Ends its whole session."""
        grace = {"grace_seconds": _NESTED_GRACE_SECONDS} if is_ending.is_set() else {}
        kill_session(self.mark, **grace)
        if self.process is not None:
            self.process.wait()


def _finished(directory: Path, envelope: RequestEnvelope, result_type: type[R]) -> R | None:
    answer = read_record(directory / RESULT, ResultEnvelope)
    if answer is None or answer.fingerprint != envelope.fingerprint:
        return None
    try:
        return result_type.model_validate(answer.result)
    except ValidationError as error:
        raise StorageError(
            f"{directory / RESULT} does not fit {result_type.__name__}: {error}; "
            "delete it to run the stage again"
        ) from error


def child_environment(settings: Settings) -> dict[str, str]:
    """Environment of another process with the same code and settings."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if settings.device == "cpu" else {}
    is_alone = settings.ray_address is None and load_launch() is None
    # otherwise gloo takes the address that the host name resolves to
    near = {"GLOO_SOCKET_IFNAME": "lo"} if is_alone else {}
    return {
        **os.environ,
        **CHILD_ENVIRONMENT,
        **near,
        **settings.to_environment(),
        **hidden,
    }


def _give_up(child: _Child, directory: Path, owner: Path, error: BaseException) -> None:
    """Ends the child unless another supervisor waits for it too."""
    with locked(directory / START_LOCK):
        owner.unlink(missing_ok=True)
        others = live_owners(directory)
        if others:
            waiting = ", ".join(str(mark.pid) for mark in others)
            _logger.info("child is left running %s", fields(pid=child.mark.pid, wanted_by=waiting))
            return
        note_ending(
            directory, f"{type(error).__name__} {error}", is_error=isinstance(error, Exception)
        )
        child.kill()


def note_ending(directory: Path, reason: str, *, is_error: bool = False) -> None:
    """Notes why the child of a directory is about to be ended, for `ostinato status`."""
    ending = Ending(is_error=is_error, reason=reason.strip(), at=time.time())
    with contextlib.suppress(OSError):  # a full disk is no reason to leave the child running
        replace_text(directory / ENDING, ending.model_dump_json())


def _attach_or_start(order: _Order, owner: Path) -> _Child:
    with locked(order.directory / START_LOCK):
        child = _attached_or_started(order)
        try:
            owner.parent.mkdir(exist_ok=True)
            replace_text(owner, mark_process(os.getpid()).model_dump_json())
        except BaseException:
            if child.process is not None:  # nobody else can wait for it yet
                child.kill()
            raise
        return child


def _require_silence(directory: Path, mark: ProcessMark) -> None:
    """Raises ClusterError when a child of another host gives signs of life."""
    beat = directory / HEARTBEAT
    before = beat.stat().st_mtime_ns if beat.exists() else 0
    deadline = time.monotonic() + _SILENCE_SECONDS
    while time.monotonic() < deadline:
        if beat.exists() and beat.stat().st_mtime_ns != before:
            raise ClusterError(
                f"process {mark.pid} of host {mark.host} works in {directory}, wanted none; run "
                "this there, or end that process first"
            )
        time.sleep(_POLL_SECONDS)


def _attached_or_started(order: _Order) -> _Child:
    directory = order.directory
    mark = read_record(directory / PROCESS, ProcessMark)
    asked = read_record(directory / REQUEST, RequestEnvelope)
    is_same_request = asked is not None and asked.fingerprint == order.envelope.fingerprint
    if mark is not None and is_elsewhere(mark):
        _require_silence(directory, mark)
    if mark is not None and is_alive(mark):
        if not is_same_request:
            raise ClusterError(
                f"process {mark.pid} works in {directory} on another request, wanted none; "
                "end it or wait for it"
            )
        _logger.info("re-attached %s", fields(pid=mark.pid, directory=directory))
        return _Child(mark, was_orphan=not live_owners(directory))
    if mark is not None:
        num_left = kill_session(mark)
        _logger.info("ended leftovers %s", fields(pid=mark.pid, processes=num_left))
    if asked is not None and not is_same_request:
        _set_aside(directory, asked.fingerprint)
    return _start(order)


def _set_aside(directory: Path, fingerprint: str) -> None:
    """Moves the files of another request away, so that this one does not resume from them."""
    aside = directory.with_name(f"{directory.name}.superseded-{fingerprint}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for path in directory.iterdir():
        if path.name not in (START_LOCK, LOCK, OWNERS):
            path.rename(aside / path.name)
    _logger.warning("set aside other work %s", fields(directory=directory, moved_to=aside))


def _start(order: _Order) -> _Child:
    directory, envelope = order.directory, order.envelope
    for stale in (RESULT, FAILURE, PROCESS, PROGRESS, HEARTBEAT, STATUS, ENDING):
        (directory / stale).unlink(missing_ok=True)
    replace_text(directory / REQUEST, envelope.model_dump_json(indent=1))
    command = [
        sys.executable,
        "-P",
        "-m",
        "ostinato.infra.platform.cluster.child_main",
        envelope.entry,
        str(directory),
        str(order.outlive_seconds),
        *([ALONE] if order.alone else []),
    ]
    with (directory / LOG).open("ab") as log:
        log.write(f"--- attempt {envelope.fingerprint} ---\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(order.environment),
        )
    child = _Child(mark_process(process.pid), process)
    try:
        _await_mark(child, directory)
    except BaseException:
        child.kill()
        raise
    return child


def _await_mark(child: _Child, directory: Path) -> None:
    """Waits for the child's mark. The caller holds the start lock, so that no second child starts."""
    deadline = time.monotonic() + _MARK_WAIT_SECONDS
    while not (directory / PROCESS).exists() and child.exit_code() is None:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"child {child.mark.pid} in {directory} did not begin within "
                f"{_MARK_WAIT_SECONDS:.0f} s{log_tail(directory / LOG)}"
            )
        time.sleep(_POLL_SECONDS / 10)


class _Heartbeat:
    """Heartbeat and progress of a child, as its supervisor sees them.

    Times are the supervisor's own, so clocks of other machines and a suspended machine do not matter.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._limits = (settings.heartbeat_limit_seconds, settings.stall_limit_seconds)
        self._beat_ns = 0
        self._progress: Progress | None = None
        self._beat_at = self._progress_at = time.monotonic()

    def newer_progress(self, *, must_live: bool) -> Progress | None:
        """New progress since the last call. ClusterError when a child that must be alive exceeds a limit."""
        now = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            beat_ns = (self._directory / HEARTBEAT).stat().st_mtime_ns
            if beat_ns != self._beat_ns:
                self._beat_ns, self._beat_at = beat_ns, now
        progress = read_record(self._directory / PROGRESS, Progress)
        is_new = progress is not None and progress != self._progress
        if is_new:
            self._progress, self._progress_at = progress, now
        for since, limit, what in (
            (self._beat_at, self._limits[0], "heartbeat"),
            (self._progress_at, self._limits[1], "progress"),
        ):
            if must_live and now - since > limit:
                raise ClusterError(
                    f"no {what} of the child in {self._directory} for {now - since:.0f} s, wanted "
                    f"one within {limit:g} s: it is stopped or blocked; it resumes from its last "
                    f"checkpoint{log_tail(self._directory / LOG)}"
                )
        return progress if is_new else None


def _watch(
    child: _Child, on_progress: OnProgress | None, check: Callable[[], None], heartbeat: _Heartbeat
) -> int:
    while True:
        check()
        if is_ending.is_set():
            raise ClusterError(f"process {os.getpid()} was told to end while {child.mark.pid} ran")
        exit_code = child.exit_code()
        progress = heartbeat.newer_progress(must_live=exit_code is None)
        if on_progress is not None and progress is not None:
            _report(on_progress, progress)
        if exit_code is not None:
            return exit_code
        _wait(child)


def _report(on_progress: OnProgress, progress: Progress) -> None:
    try:
        on_progress(progress)
    except Exception:  # a progress bar must never end a training run
        _logger.exception("progress cannot be shown %s", fields(done=progress.done))


def _wait(child: _Child) -> None:
    if child.process is None:
        time.sleep(_POLL_SECONDS)
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(_POLL_SECONDS)


def _error(entry: str, directory: Path, exit_code: int) -> Exception:
    failure = read_record(directory / FAILURE, Failure)
    if failure is not None:
        error_type = ERROR_TYPES.get(failure.error_type, ClusterError)
        return error_type(f"{failure.message}{log_tail(directory / LOG)}")
    if exit_code == EXIT_LOCKED:
        return ClusterError(f"{directory / LOCK} is held by another process, wanted by none")
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < _FULL_DISK_BYTES:
        return StorageError(
            f"{entry} in {directory} ended without a result, and the disk there is full: {free_bytes} "
            f"bytes free; free space, then run again: it resumes from its last checkpoint"
            f"{log_tail(directory / LOG)}"
        )
    how = f"by signal {-exit_code}" if exit_code < -1 else f"with exit code {exit_code}"
    return ClusterError(
        f"{entry} in {directory} ended {how} without a result; it resumes from its last checkpoint"
        f"{log_tail(directory / LOG)}"
    )

"""The directory that a supervised child and its supervisor share.

Defines the file names, their formats, and `Workspace`, the only part that a stage's `main` sees. Every file except the
logs is replaced atomically, so either side may be killed at any moment.
"""

import fcntl
import hashlib
import json
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ostinato.infra.platform.record import Placed, Record, finite
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import MetricsLog

REQUEST = "request.json"
RESULT = "result.json"
FAILURE = "failure.json"
PROGRESS = "progress.json"
METRICS = "metrics.jsonl"
STATUS = "status.json"  # a StageStatus
LOG = "child.log"
LOCK = "child.lock"
PROCESS = "child.pid"
START_LOCK = "start.lock"
HEARTBEAT = "heartbeat"  # touched by a child for as long as its threads run
OWNERS = "owners"  # marks of the supervisors that wait for the child
ENDING = "ending.json"  # why a supervisor ended the child
ALONE = "--alone"  # option of a child that holds the lock of the machine's device
EXIT_LOCKED = 4  # exit code of a child that found the lock of its directory held
PUBLISHED = "published.txt"  # reference of the artifact that was published from the directory

_UPDATES_PER_SECOND = 10  # of the progress file; a loop's further ones are dropped

R = TypeVar("R", bound=BaseModel)


class Progress(Record):
    """Progress of a child process."""

    done: float
    total: float = Field(description="value of done at the end")
    message: str
    metrics: dict[str, float | int | str] = Field(default={})
    at: float


class RequestEnvelope(Record):
    """Request to a child process."""

    entry: str = Field(description="module:function")
    fingerprint: str
    request: dict[str, Any]


class ResultEnvelope(Record):
    """Result of a child process. The file's presence marks completion."""

    fingerprint: str = Field(description="fingerprint of the request it answers")
    result: dict[str, Any]


class Failure(Record):
    """The typed error that a child ended with."""

    error_type: str
    message: str


class Ending(Record):
    """Reason why a supervisor ended its child."""

    is_error: bool = Field(description="false: the end was requested")
    reason: str
    at: float


class ProcessMark(Record):
    """Identity of a process, distinct from a later one with the same id."""

    pid: int
    started_at: float = Field(description="process creation time as the kernel reports it")
    host: str
    boot_id: str = Field(description="boot id of the kernel")
    booted_at: float = Field(description="boot time on the clock that started_at is on")


class ProgressWriter:
    """Writer of a child's progress and metrics."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / PROGRESS
        self._metrics = MetricsLog(directory / METRICS)
        self._written_at = deque[float](maxlen=_UPDATES_PER_SECOND)  # of the newest updates

    def update(
        self, done: float, total: float, message: str = "", **metrics: float | int | str
    ) -> None:
        """Notes progress. Metrics become one line of metrics.jsonl with `done` as their step."""
        if metrics:
            self._metrics.append(done, metrics)
        now = time.monotonic()
        is_fast = len(self._written_at) == _UPDATES_PER_SECOND and now - self._written_at[0] < 1.0
        if done < total and is_fast:
            return
        self._written_at.append(now)
        progress = Progress(
            done=done, total=total, message=message, metrics=finite(metrics), at=time.time()
        )
        replace_text(self._path, progress.model_dump_json())


@dataclass(frozen=True)
class Workspace:
    """Directory (kept across attempts), settings and progress of a child's `main`."""

    directory: Path
    settings: Settings
    progress: ProgressWriter

    @classmethod
    def open(cls, directory: Path, settings: Settings) -> "Workspace":
        return cls(directory, settings, ProgressWriter(directory))


def make_envelope(entry: str, request: BaseModel) -> RequestEnvelope:
    """The request with the identity by which its result is recognised."""
    content = request.model_dump(mode="json")
    # without defaults, so that a new field in a later version keeps the fingerprint of a run under way
    placement = request.placement() if isinstance(request, Placed) else None
    written = request.model_dump(mode="json", exclude_defaults=True, exclude=placement)
    canonical = json.dumps([entry, written], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]
    return RequestEnvelope(entry=entry, fingerprint=digest, request=content)


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that readers see the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def try_lock(lock: IO[str]) -> bool:
    """Whether this process got the lock of an open file. It holds the lock until the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_record(path: Path, record_type: type[R]) -> R | None:
    """The record in a file. None when the file is missing or another version of the program wrote it."""
    try:
        return record_type.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None

"""The program that a supervised child runs:
`python -m ostinato.infra.platform.cluster.child_main ENTRY DIRECTORY OUTLIVE_SECONDS [--alone]`.

It holds the lock of the directory for as long as it lives, so a second child of the same directory
ends at once.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from pydantic import BaseModel, ValidationError

from ostinato.infra.platform.cluster.processes import (
    is_alive,
    is_ending,
    kill_session,
    live_owners,
    mark_process,
)
from ostinato.infra.platform.cluster.stage_status import BlockedOn, StageStatus
from ostinato.infra.platform.cluster.workspace import (
    ALONE,
    EXIT_LOCKED,
    FAILURE,
    HEARTBEAT,
    LOCK,
    PROCESS,
    REQUEST,
    RESULT,
    STATUS,
    Failure,
    ProcessMark,
    RequestEnvelope,
    ResultEnvelope,
    Workspace,
    read_record,
    replace_text,
    try_lock,
)
from ostinato.infra.platform.errors import (
    ConfigError,
    OstinatoError,
    TrainingError,
    boundary,
    is_retryable,
    type_name,
)
from ostinato.infra.platform.extras import explain_missing
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.platform.telemetry import configure_logging, fields

EXIT_RETRY = 1
EXIT_NEVER_RETRY = 3
EXIT_TERMINATED = 143
_BEAT_SECONDS = 5.0
_DEVICE_POLL_SECONDS = 1.0

_logger = logging.getLogger(__name__)

Main = Callable[[BaseModel, Workspace], BaseModel]


def main(
    entry: str, directory: Path, outlive_seconds: float = math.inf, *, alone: bool = False
) -> int:
    """Runs one request to its end and returns the exit code. `alone`: under the lock of this machine's device."""
    lock = (directory / LOCK).open("w")
    if not try_lock(lock):
        return EXIT_LOCKED
    replace_text(directory / PROCESS, mark_process(os.getpid()).model_dump_json())
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_beat, args=(directory, outlive_seconds), daemon=True).start()
    configure_logging()
    _logger.info("child starts %s", fields(entry=entry, pid=os.getpid(), directory=directory))
    try:
        with boundary(TrainingError, f"{entry} in {directory}"):
            _run(entry, directory, alone=alone)
    except OstinatoError as error:
        traceback.print_exc()
        failure = Failure(error_type=type_name(error), message=str(error))
        replace_text(directory / FAILURE, failure.model_dump_json())
        return EXIT_RETRY if is_retryable(error) else EXIT_NEVER_RETRY
    return 0


def _beat(directory: Path, outlive_seconds: float) -> None:
    """Touches the heartbeat at least four times per heartbeat limit. Ends this session when no supervisor has
    waited for it for `outlive_seconds`.
    """
    seconds = min(_BEAT_SECONDS, load_settings().heartbeat_limit_seconds / 4, outlive_seconds / 2)
    wanted_at = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            (directory / HEARTBEAT).touch()
            if live_owners(directory):
                wanted_at = time.monotonic()
        if time.monotonic() - wanted_at > outlive_seconds:
            _logger.warning(
                "child ends, no supervisor waits for it %s", fields(directory=directory)
            )
            kill_session(mark_process(os.getpid()))
        time.sleep(seconds)


def _run(entry: str, directory: Path, *, alone: bool) -> None:
    envelope = read_record(directory / REQUEST, RequestEnvelope)
    if envelope is None or envelope.entry != entry:
        seen = envelope.entry if envelope is not None else None
        raise ConfigError(f"{directory / REQUEST} asks for {seen!r}, wanted {entry!r}")
    workspace = Workspace.open(directory, load_settings())
    with _device_alone(workspace) if alone else contextlib.nullcontext():
        result = answer_request(envelope, workspace)
    answer = ResultEnvelope(fingerprint=envelope.fingerprint, result=result.model_dump(mode="json"))
    replace_text(directory / RESULT, json.dumps(answer.model_dump(mode="json"), indent=1))
    _logger.info("child is done %s", fields(entry=entry, directory=directory))


class Trainer(Record):
    """The trainer that holds the device: the content of the lock file."""

    process: ProcessMark
    directory: str


@contextlib.contextmanager
def _device_alone(workspace: Workspace) -> Iterator[None]:
    """Holds the lock of this machine's device during the block: one trainer at a time, whichever run or deployment
    started it. Waits for a trainer that holds it, and reports the wait. The trainer process itself holds the lock, so
    it keeps the lock when it outlives its supervisor, and the kernel releases it however the process ends.
    """
    path = workspace.settings.home / f"trainer-{socket.gethostname()}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = Trainer(process=mark_process(os.getpid()), directory=str(workspace.directory))
    with path.open("a+") as lock:
        _take_device(lock, path, workspace)
        lock.truncate(0)
        lock.write(own.model_dump_json())
        lock.flush()
        yield


def _take_device(lock: IO[str], path: Path, workspace: Workspace) -> None:
    since = None
    while not try_lock(lock):
        holder = read_record(path, Trainer)  # None: it has just begun
        other = holder.directory if holder is not None else "another trainer"
        if since is None:
            since = time.time()
            _logger.info("waits for the device %s", fields(held_by=other))
        if holder is not None and not is_alive(holder.process):
            kill_session(holder.process)  # processes that a killed trainer left
        workspace.progress.update(0, 1, f"waits for the device, which {other} has")
        wait = BlockedOn(what="the device", detail=f"{other} has it", since=since)
        status = StageStatus(phase="waiting", at=time.time(), waits={"trainer": wait})
        replace_text(workspace.directory / STATUS, status.model_dump_json())
        time.sleep(_DEVICE_POLL_SECONDS)
    if since is not None:
        (workspace.directory / STATUS).unlink(missing_ok=True)


def answer_request(envelope: RequestEnvelope, workspace: Workspace) -> BaseModel:
    """Calls the entry of a request. ConfigError when the request does not fit the entry's model."""
    function, request_type = _resolve(envelope.entry)
    try:
        request = request_type.model_validate(envelope.request)
    except ValidationError as error:
        raise ConfigError(f"request for {envelope.entry} is wrong: {error}") from error
    return function(request, workspace)


def load_entry(entry: str) -> Any:
    """The function that "module:function" names. ConfigError when there is none."""
    module_name, _, function_name = entry.partition(":")
    try:
        return vars(importlib.import_module(module_name))[function_name]
    except (ModuleNotFoundError, KeyError) as error:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        missing = explain_missing(package) or f"{error}; wanted module:function"
        raise ConfigError(f"entry {entry!r} cannot be found: {missing}") from error


def _resolve(entry: str) -> tuple[Main, type[BaseModel]]:
    function = load_entry(entry)
    parameters = [
        kind for name, kind in typing.get_type_hints(function).items() if name != "return"
    ]
    is_typed = (
        parameters and isinstance(parameters[0], type) and issubclass(parameters[0], BaseModel)
    )
    if not is_typed:
        raise ConfigError(
            f"entry {entry!r} must annotate its first parameter with a pydantic model"
        )
    return function, parameters[0]


def _end(_signal_number: int, _frame: FrameType | None) -> NoReturn:
    is_ending.set()
    sys.exit(EXIT_TERMINATED)  # as an exception, so that cleanup in the stage runs


if __name__ == "__main__":
    exit_code = main(
        sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), alone=ALONE in sys.argv[4:]
    )
    sys.stderr.flush()
    sys.exit(exit_code)

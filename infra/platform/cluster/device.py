"""The lock of this machine's device: one trainer at a time, whichever run or deployment started it.

The trainer process itself holds the lock, so it keeps the lock when it outlives its supervisor, and the kernel
releases it however the process ends.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ostinato.infra.platform.cluster.processes import is_alive, kill_session, mark_process
from ostinato.infra.platform.cluster.stage_status import BlockedOn, StageStatus
from ostinato.infra.platform.cluster.workspace import (
    STATUS,
    ProcessMark,
    Workspace,
    read_record,
    replace_text,
    try_lock,
)
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.telemetry import fields

_POLL_SECONDS = 1.0
_logger = logging.getLogger(__name__)


class Trainer(Record):
    """The trainer that holds the device: the content of the lock file."""

    process: ProcessMark
    directory: str


@contextlib.contextmanager
def device_alone(workspace: Workspace) -> Iterator[None]:
    """Holds the device during the block. Waits for a trainer that holds it, and reports the wait."""
    path = workspace.settings.home / f"trainer-{socket.gethostname()}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = Trainer(process=mark_process(os.getpid()), directory=str(workspace.directory))
    with path.open("a+") as lock:
        _take(lock, path, workspace)
        lock.truncate(0)
        lock.write(own.model_dump_json())
        lock.flush()
        yield


def _take(lock: IO[str], path: Path, workspace: Workspace) -> None:
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
        time.sleep(_POLL_SECONDS)
    if since is not None:
        (workspace.directory / STATUS).unlink(missing_ok=True)

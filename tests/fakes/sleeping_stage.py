"""The directory of a stage whose process sleeps."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.stage_status import StageStatus
from ostinato.infra.platform.cluster.workspace import HEARTBEAT, PROCESS, STATUS, replace_text


@contextmanager
def sleeping_stage(directory: Path, status: StageStatus | None = None) -> Iterator[Path]:
    """The directory, with a heartbeat of now and a status."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)  # it has not begun
        replace_text(directory / PROCESS, mark_process(process.pid).model_dump_json())
        (directory / HEARTBEAT).touch()
        if status is not None:
            replace_text(directory / STATUS, status.model_dump_json())
        yield directory
    finally:
        process.kill()
        process.wait()

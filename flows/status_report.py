"""What `ostinato status` says: every stage directory of this machine, whether it lives, what waits for what and since when."""

import json
import time
from pathlib import Path

from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.workspace import (
    PROCESS,
    PROGRESS,
    PUBLISHED,
    RESULT,
    STATUS,
    ProcessMark,
    Progress,
    read_record,
)
from ostinato.infra.platform.settings import Settings


def collect(settings: Settings) -> list[tuple[str, str, str, str, str, str]]:
    """Rows of run, stage, state, waits for, since, progress. Newest run last."""
    rows = []
    for directory in sorted(
        (settings.home / "runs").glob("*/*"), key=lambda path: path.stat().st_mtime
    ):
        if directory.is_dir():
            rows += _stage_rows(directory)
    return rows


def _stage_rows(directory: Path) -> list[tuple[str, str, str, str, str, str]]:
    run, stage = directory.parent.name, directory.name
    progress = read_record(directory / PROGRESS, Progress)
    how_far = f"{progress.done:g}/{progress.total:g} {progress.message}" if progress else ""
    for name in (PUBLISHED, RESULT):
        if (directory / name).is_file():
            return [(run, stage, "finished", "", _ago((directory / name).stat().st_mtime), "")]
    mark = read_record(directory / PROCESS, ProcessMark)
    if mark is None or not is_alive(mark):
        since = _ago(progress.at) if progress else ""
        return [(run, stage, "stopped", "the same command again", since, how_far)]
    waits = _waits(directory / STATUS)
    if not waits:
        return [(run, stage, "running", "", _ago(progress.at) if progress else "", how_far)]
    return [
        (run, f"{stage} {part}", "running", what, since, how_far) for part, what, since in waits
    ]


def _waits(path: Path) -> list[tuple[str, str, str]]:
    if not path.is_file():
        return []
    status = json.loads(path.read_text())
    return [
        (part, f"{wait['for']} ({wait['detail']})", _ago(wait["since"]))
        for part, wait in status["waits"].items()
    ]


def _ago(instant: float) -> str:
    seconds = max(0.0, time.time() - instant)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"

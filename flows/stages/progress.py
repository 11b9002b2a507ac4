"""Progress of a stage as people see it: a bar on a terminal, a line every few seconds elsewhere or where it
is watched, and an artifact of the Prefect run.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefect import artifacts
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ostinato.flows.stages.artifacts import optional
from ostinato.flows.stages.console import WatchLines, is_watched
from ostinato.infra.platform.cluster.workspace import Progress

logger = logging.getLogger(__name__)

_TELL_SECONDS = 3.0
_LINE_SECONDS = 10.0
_END_SECONDS = 5.0  # longest the end of a stage waits for the server


@contextmanager
def shown_progress(stage: str, key: str, description: str) -> Iterator[Callable[[Progress], None]]:
    """Yields what takes the progress of a stage and returns at once."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[stage]:<22}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    lines = WatchLines(stage) if is_watched() else None
    has_bar = console.is_terminal and lines is None
    bar = Bar(*columns, console=console, refresh_per_second=4, disable=not has_bar)
    task = bar.add_task("starting", total=1.0, stage=stage)
    artifact = _Artifact(key, description)
    lined_at = float("-inf")

    def show(progress: Progress) -> None:
        nonlocal lined_at
        ratio = min(1.0, progress.done / progress.total) if progress.total > 0 else 0.0
        bar.update(task, completed=ratio, description=progress.message)
        artifact.percent = 100 * ratio
        if lines is not None:
            lines.update(progress.done, progress.total, progress.message)
        elif not has_bar and time.monotonic() - lined_at >= _LINE_SECONDS:
            lined_at = time.monotonic()
            logger.info("stage=%s percent=%.0f %s", stage, 100 * ratio, progress.message)

    artifact.start()
    try:
        with bar:
            yield show
    finally:
        if lines is not None:
            lines.flush()
        artifact.is_over.set()
        artifact.join(_END_SECONDS)


class _Artifact(threading.Thread):
    """Thread that tells the server, so that one that is away costs the stage no time."""

    def __init__(self, key: str, description: str) -> None:
        context = contextvars.copy_context()
        super().__init__(target=context.run, args=(self._tell, key, description), daemon=True)
        self.percent = 0.0
        self.is_over = threading.Event()

    def _tell(self, key: str, description: str) -> None:
        artifact_id: Any = None
        told, is_over = -1.0, False
        while not is_over:
            is_over = self.is_over.wait(_TELL_SECONDS)
            percent = self.percent
            if percent == told:
                continue
            with optional(key):
                if artifact_id is None:
                    artifact_id = artifacts.create_progress_artifact(percent, key, description)
                else:
                    artifacts.update_progress_artifact(artifact_id, percent)
                told = percent

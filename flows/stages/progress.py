"""Progress of a running stage: a bar on a terminal, lines every few seconds elsewhere or with --watch, and an
artifact of the Prefect run. Its curves are shown as pictures of that run.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import artifacts
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ostinato.flows.stages.artifacts import optional, refresh_image
from ostinato.flows.stages.console import WatchLines, is_watched
from ostinato.flows.stages.curves import plot_png, stage_curves
from ostinato.flows.stages.naming import as_key
from ostinato.infra.platform.cluster.workspace import METRICS, Progress

logger = logging.getLogger(__name__)

_UPDATE_SECONDS = 3.0
_LINE_SECONDS = 10.0
# People do not look more often, and drawing takes a second of a core that the stage could use.
PICTURE_SECONDS = 60.0
_END_SECONDS = 5.0  # maximum time that the end of a stage waits for the server


@contextmanager
def shown_progress(stage: str, key: str, description: str) -> Iterator[Callable[[Progress], None]]:
    """Yields a function that shows the progress of a stage and returns at once."""
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
    """Thread that sends progress to the server, so that an unreachable server does not delay the stage."""

    def __init__(self, key: str, description: str) -> None:
        context = contextvars.copy_context()
        super().__init__(target=context.run, args=(self._send, key, description), daemon=True)
        self.percent = 0.0
        self.is_over = threading.Event()

    def _send(self, key: str, description: str) -> None:
        artifact_id: Any = None
        sent, is_over = -1.0, False
        while not is_over:
            is_over = self.is_over.wait(_UPDATE_SECONDS)
            percent = self.percent
            if percent == sent:
                continue
            with optional(key):
                if artifact_id is None:
                    artifact_id = artifacts.create_progress_artifact(percent, key, description)
                else:
                    artifacts.update_progress_artifact(artifact_id, percent)
                sent = percent


@contextmanager
def shown_pictures(stage: str, directory: Path) -> Iterator[None]:
    """Within the block, redraws the metrics of a stage's directory every minute, and once more at the end."""
    pictures = _Pictures(stage, directory)
    pictures.start()
    try:
        yield
    finally:
        pictures.is_over.set()
        pictures.join(_END_SECONDS)


class _Pictures(threading.Thread):
    """Thread that draws the pictures, so that no failure and no unreachable server affects the stage."""

    def __init__(self, stage: str, directory: Path) -> None:
        context = contextvars.copy_context()
        super().__init__(target=context.run, args=(self._show,), daemon=True)
        self.is_over = threading.Event()
        self._stage, self._directory = stage, directory
        self._shown: dict[str, UUID] = {}
        self._drawn_at = 0  # modification time of the metrics drawn last

    def _show(self) -> None:
        is_over = False
        while not is_over:
            is_over = self.is_over.wait(PICTURE_SECONDS)
            with optional(f"pictures of {self._stage}"):
                self._refresh(self._directory / METRICS)

    def _refresh(self, metrics: Path) -> None:
        changed_at = metrics.stat().st_mtime_ns if metrics.exists() else 0
        if changed_at == self._drawn_at:
            return
        for curve in stage_curves(metrics):
            key = as_key(self._directory.parent.name, self._stage, curve.key)
            self._shown[key] = refresh_image(
                plot_png(curve), key, curve.expected, self._shown.get(key)
            )
        self._drawn_at = changed_at

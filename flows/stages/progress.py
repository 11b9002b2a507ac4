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
    percent = 0.0
    lined_at = float("-inf")

    def show(progress: Progress) -> None:
        nonlocal percent, lined_at
        ratio = min(1.0, progress.done / progress.total) if progress.total > 0 else 0.0
        bar.update(task, completed=ratio, description=progress.message)
        percent = 100 * ratio
        if lines is not None:
            lines.update(progress.done, progress.total, progress.message)
        elif not has_bar and time.monotonic() - lined_at >= _LINE_SECONDS:
            lined_at = time.monotonic()
            logger.info("stage=%s percent=%.0f %s", stage, percent, progress.message)

    artifact_id: Any = None
    sent = -1.0

    def send() -> None:
        nonlocal artifact_id, sent
        now = percent
        if now == sent:
            return
        with optional(key):
            if artifact_id is None:
                artifact_id = artifacts.create_progress_artifact(now, key, description)
            else:
                artifacts.update_progress_artifact(artifact_id, now)
            sent = now

    with _repeated(send, _UPDATE_SECONDS):
        try:
            with bar:
                yield show
        finally:
            if lines is not None:
                lines.flush()


@contextmanager
def shown_pictures(stage: str, directory: Path, link: str) -> Iterator[None]:
    """Within the block, redraws the metrics of a stage's directory every minute, and once more at the end. `link`: to
    its plots, for each picture's description.
    """
    metrics = directory / METRICS
    shown: dict[str, UUID] = {}
    drawn_at = 0  # modification time of the metrics drawn last

    def draw() -> None:
        nonlocal drawn_at
        with optional(f"pictures of {stage}"):
            changed_at = metrics.stat().st_mtime_ns if metrics.exists() else 0
            if changed_at == drawn_at:
                return
            for curve in stage_curves(metrics):
                key = as_key(directory.parent.name, stage, curve.key)
                described = f"{curve.expected} {link}"
                shown[key] = refresh_image(plot_png(curve), key, described, shown.get(key))
            drawn_at = changed_at

    with _repeated(draw, PICTURE_SECONDS):
        yield


@contextmanager
def _repeated(action: Callable[[], None], pause_seconds: float) -> Iterator[None]:
    """Within the block, a thread calls `action` after each pause, and once more at the end, so that neither a failure
    nor an unreachable server delays the stage.
    """
    is_over = threading.Event()

    def run() -> None:
        has_ended = False
        while not has_ended:
            has_ended = is_over.wait(pause_seconds)
            action()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_END_SECONDS)

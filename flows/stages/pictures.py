"""Curves of a stage under way as pictures of its Prefect run."""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from ostinato.flows.stages.artifacts import optional, refresh_image
from ostinato.flows.stages.curves import plot_png, stage_curves
from ostinato.flows.stages.naming import as_key
from ostinato.infra.platform.cluster.workspace import METRICS

# People look no more often, and drawing takes a second of a core that the stage could use.
REFRESH_SECONDS = 60.0
_END_SECONDS = 5.0  # longest the end of a stage waits for the last ones


@contextmanager
def shown_pictures(stage: str, directory: Path) -> Iterator[None]:
    """Draws the metrics of a stage's directory anew from time to time, and at the end."""
    pictures = _Pictures(stage, directory)
    pictures.start()
    try:
        yield
    finally:
        pictures.is_over.set()
        pictures.join(_END_SECONDS)


class _Pictures(threading.Thread):
    """Thread that draws, so that no failure and no server that is away reaches the stage."""

    def __init__(self, stage: str, directory: Path) -> None:
        context = contextvars.copy_context()
        super().__init__(target=context.run, args=(self._show,), daemon=True)
        self.is_over = threading.Event()
        self._stage, self._directory = stage, directory
        self._shown: dict[str, UUID] = {}
        self._drawn_at = 0  # the file's time

    def _show(self) -> None:
        is_over = False
        while not is_over:
            is_over = self.is_over.wait(REFRESH_SECONDS)
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

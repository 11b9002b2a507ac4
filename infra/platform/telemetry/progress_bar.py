"""Shows how far a long stage is: a bar on a terminal, a line every few seconds elsewhere, and a sink."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

_SINK_SECONDS = 3.0
_LINE_SECONDS = 10.0


class StageBar(AbstractContextManager["StageBar"]):
    """Context manager around one stage's progress."""

    def __init__(self, name: str, sink: Callable[[float], object]) -> None:
        """`sink` gets the percentage every few seconds and at the end."""
        self._name, self._sink = name, sink
        self._sunk_at = self._lined_at = float("-inf")
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.fields[stage]:<22}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=1.0, stage=name)
        if self._is_terminal:
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._bar.stop()

    def update(self, done: float, total: float, message: str) -> None:
        """Moves the bar. `done` and `total` are in any one unit."""
        ratio = min(1.0, done / total) if total > 0 else 0.0
        now = time.monotonic()
        self._bar.update(self._task, completed=ratio, description=message)
        if not self._is_terminal and now - self._lined_at >= _LINE_SECONDS:
            self._lined_at = now
            logger.info("stage=%s percent=%.0f %s", self._name, 100 * ratio, message)
        if now - self._sunk_at >= _SINK_SECONDS or ratio >= 1:
            self._sunk_at = now
            self._sink(100 * ratio)

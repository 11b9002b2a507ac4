"""Shows how far a long stage is: a bar on a terminal, a line every few seconds elsewhere, and an
optional sink.
"""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class StageBar:
    """Context manager around one stage's progress."""

    def __init__(
        self,
        name: str,
        sink: Callable[[float], object] | None = None,
        *,
        sink_every_seconds: float = 3.0,
        line_every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._sink = sink
        self._sink_every_seconds = sink_every_seconds
        self._line_every_seconds = line_every_seconds
        self._clock = clock
        self._sunk_at = float("-inf")
        self._lined_at = float("-inf")
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

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            self._bar.stop()

    def update(self, done: float, total: float, message: str) -> None:
        """Moves the bar. `done` and `total` are in any one unit."""
        ratio = min(1.0, done / total) if total > 0 else 0.0
        now = self._clock()
        self._bar.update(self._task, completed=ratio, description=message)
        if not self._is_terminal and now - self._lined_at >= self._line_every_seconds:
            self._lined_at = now
            logger.info("stage=%s percent=%.0f %s", self._name, 100 * ratio, message)
        if self._sink is not None and (
            now - self._sunk_at >= self._sink_every_seconds or ratio >= 1
        ):
            self._sunk_at = now
            self._sink(100 * ratio)

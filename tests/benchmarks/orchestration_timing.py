"""Where the wall time of a flow's process goes: in Prefect, in stages' children, in the flows' own work.

`python -m tests.benchmarks.orchestration_timing REPORT FLOW ...` runs what `ostinato.flows.commands.run_flow` runs,
with the main thread's time noted at the borders and written to REPORT as JSON. Prefect's is what lies between a call
of a flow or task and its function, artifacts, events and log records, and all that a task does around its child.
"""

import contextlib
import functools
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PREFECT, STAGE, OWN = "prefect", "stage", "own"


class WallClock:
    """Wall time of the main thread by category and label; inner blocks are taken out of outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._within = [(OWN, "imports and start")]
        self._since = time.monotonic()

    def note(self) -> None:
        """Gives the time since the last border to the innermost block."""
        now = time.monotonic()
        category, label = self._within[-1]
        self.seconds[category][label] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def block(self, category: str, label: str = "") -> Iterator[None]:
        """Time of the block is of the category; without a label, under that of the block around it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.note()
        self._within.append((category, label or self._within[-1][1]))
        try:
            yield
        finally:
            self.note()
            self._within.pop()

    def wrap(self, category: str, function: Callable[..., Any], label: str = "") -> Any:
        """The function, with its time noted."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.block(category, label):
                return function(*args, **kwargs)

        return timed


def put_borders(clock: WallClock) -> None:
    """Wraps Prefect's ends and ours, before any flow is imported."""
    with clock.block(PREFECT, "imports"):
        from prefect import Flow, Task, artifacts, events
        from prefect.logging.handlers import APILogHandler
    make_flow, call_flow, call_task = Flow.__init__, Flow.__call__, Task.__call__

    def init(flow: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        make_flow(flow, clock.wrap(OWN, fn), *args, **kwargs)

    def run_flow(flow: Any, *args: Any, **kwargs: Any) -> Any:
        with clock.block(PREFECT, f"flow {flow.name}"):
            return call_flow(flow, *args, **kwargs)

    def run_task(task: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        with clock.block(PREFECT, f"stage {name}"):
            return call_task(task, name, *args, **kwargs)

    borders = ((Flow, "__init__", init), (Flow, "__call__", run_flow), (Task, "__call__", run_task))
    for owner, name, function in borders:
        setattr(owner, name, function)
    APILogHandler.emit = clock.wrap(PREFECT, APILogHandler.emit)
    for name in ("table", "markdown", "link", "image"):
        function = f"create_{name}_artifact"
        setattr(artifacts, function, clock.wrap(PREFECT, getattr(artifacts, function)))
    events.emit_event = clock.wrap(PREFECT, events.emit_event)
    from ostinato.flows.stages import child_task

    child_task.run_child = clock.wrap(STAGE, child_task.run_child)


def main(report: Path, arguments: list[str]) -> int:
    """Runs the flow. Returns its exit code."""
    started_at, clock = time.time(), WallClock()
    put_borders(clock)
    from ostinato.flows.commands import run_flow

    code = run_flow.main(arguments)
    clock.note()
    found = {"started_at": started_at, "ended_at": time.time(), "seconds": clock.seconds}
    report.write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

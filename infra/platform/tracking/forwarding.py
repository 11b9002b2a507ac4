"""Forwards a stage's metrics to trackers in a separate process, for which the stage never waits.

`tracked` starts the process: `python -m ostinato.infra.platform.tracking.forwarding DIRECTORY`. It follows
metrics.jsonl with one thread per tracker and stores how far each has read, so that a resumed stage continues
there. It ends by itself soon after the process that started it.
"""

import contextlib
import contextvars
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ostinato.infra.platform.cluster.child import child_environment
from ostinato.infra.platform.cluster.processes import kill_session, mark_process
from ostinato.infra.platform.cluster.workspace import (
    METRICS,
    REQUEST,
    RequestEnvelope,
    read_record,
    replace_text,
    try_lock,
)
from ostinato.infra.platform.settings import Settings, load_settings
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.platform.tracking.trackers import TrackedRun, open_tracker

logger = logging.getLogger(__name__)

STATE = "trackers.json"  # id of the run, and bytes of metrics.jsonl that each tracker has
LOG = "trackers.log"
_LOCK = "trackers.lock"
_POLL_SECONDS = 0.5
_TIMEOUT_SECONDS = 60.0  # to send the last numbers after the end of the stage
_NICENESS = 10


@contextlib.contextmanager
def tracked(
    directory: Path, settings: Settings, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Iterator[Callable[[], None]]:
    """Yields a function whose first call starts to forward the metrics of the stage in `directory`, until the
    context ends. A failure is one warning and neither ends nor delays the caller.
    """
    wanted = list(settings.trackers)
    started: list[TrackerProcess] = []

    def begin() -> None:
        if not wanted:
            return
        wanted.clear()
        # keep the files of trackers below the home, and their output quiet
        own = {"TRACKIO_DIR": str(settings.home / "trackio"), "WANDB_SILENT": "true"}
        name = f"trackers of {directory.name}"
        with _warned(name):
            command = (__name__, str(directory))
            started.append(TrackerProcess(name, command, directory / LOG, settings, own))

    try:
        yield begin
    finally:
        for process in started:
            # a thread waits for the last numbers, so the caller goes on; its warning is for the caller's log
            caller = contextvars.copy_context()
            threading.Thread(target=caller.run, args=(process.finish, timeout_seconds)).start()


@contextlib.contextmanager
def _warned(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, psutil.Error) as error:
        logger.warning("%s: not started, %s", name, error)


def run_in_process(
    name: str, command: Sequence[str], settings: Settings, timeout_seconds: float
) -> None:
    """Runs a module with its arguments in a process that a thread called `name` waits for. The caller neither
    waits nor fails: each failure is one warning.
    """
    log = settings.home / "logs" / f"{command[0].rpartition('.')[2]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with _warned(name):
        process = TrackerProcess(name, command, log, settings)
        threading.Thread(target=process.finish, args=(timeout_seconds,), name=name).start()


class TrackerProcess:
    """A process beside the work, in a session of its own. The end of its standard input tells it to finish; the
    kernel closes that input when this process is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        settings: Settings,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: a module and its arguments. `variables`: defaults of environment variables."""
        self._name, self._log = name, log
        with log.open("ab") as opened:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                stdin=subprocess.PIPE,
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**(variables or {}), **child_environment(settings)},
            )
        self._mark = mark_process(self._process.pid)

    def finish(self, timeout_seconds: float) -> None:
        """Lets the process send its last numbers, then ends its session."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(timeout_seconds)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done within {timeout_seconds:g} s"
        kill_session(self._mark, grace_seconds=0.0)  # includes helper processes of the libraries
        self._process.wait()
        if problem:
            logger.warning("%s: %s, log=%s", self._name, problem, self._log)


class Forwarding:
    """Threads that forward one file, one per tracker."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory, self._settings = directory, settings
        self._lock = threading.Lock()
        self._failed: list[str] = []
        self._state: dict[str, Any] = {"run_id": uuid.uuid4().hex, "offsets": {}}
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._state = json.loads((directory / STATE).read_text())

    def run(self, stopped: threading.Event) -> bool:
        """Forwards until the event is set, then the rest of the file. Returns whether all trackers succeeded."""
        threads = [
            threading.Thread(target=self._guarded, args=(name, stopped), daemon=True)
            for name in self._settings.trackers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not self._failed

    def _guarded(self, name: str, stopped: threading.Event) -> None:
        try:
            self._forward(name, stopped)
        except Exception:  # third-party code, over networks
            logger.exception("tracker=%s gives up", name)
            self._failed.append(name)

    def _forward(self, name: str, stopped: threading.Event) -> None:
        request = read_record(self._directory / REQUEST, RequestEnvelope)
        tracker = open_tracker(
            name,
            TrackedRun(
                run_id=self._state["run_id"],
                group=self._directory.parent.name,
                name=self._directory.name,
                home=self._settings.home,
                config={} if request is None else request.request,
            ),
        )
        # after the imports: at low priority they take longer than a short stage on a busy machine
        os.nice(_NICENESS)  # lowers this thread only
        offset = self._state["offsets"].get(name, 0)
        is_last = False
        while not is_last:
            is_last = stopped.wait(_POLL_SECONDS)
            for end, row in _rows(self._directory / METRICS, offset):
                step = int(row.pop("step"))
                numbers = {
                    key: value for key, value in row.items() if isinstance(value, int | float)
                }
                tracker.log(step, numbers)
                offset = end
            self._note(name, offset)
        tracker.close()

    def _note(self, name: str, offset: int) -> None:
        if self._state["offsets"].get(name) == offset:
            return
        with self._lock:
            self._state["offsets"][name] = offset
            replace_text(self._directory / STATE, json.dumps(self._state))


def _rows(path: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of the whole lines from an offset on, each with the offset after it. A partial line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            with contextlib.suppress(ValueError):
                yield offset, json.loads(line)


def main(directory: Path) -> int:
    """Forwards the metrics of a stage until standard input ends. Returns the exit code."""
    configure_logging()
    stopped = threading.Event()
    threading.Thread(target=_await_end, args=(stopped,), daemon=True).start()
    with (directory / _LOCK).open("w") as lock:
        while not try_lock(lock):  # held by the process of another run that waits for this stage
            if stopped.wait(_POLL_SECONDS):
                return 0
        return 0 if Forwarding(directory, load_settings()).run(stopped) else 1


def _await_end(stopped: threading.Event) -> None:
    sys.stdin.buffer.read()
    stopped.set()
    time.sleep(_TIMEOUT_SECONDS)
    os._exit(1)  # a library hangs, and the process that would end this one may be gone


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Trackers get every line that a stage wrote, in order, and nothing they do reaches the stage."""

import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import psutil
import pytest
from tensorboardX.proto.event_pb2 import Event

from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import MetricsLog
from ostinato.infra.platform.tracking import forwarding
from ostinato.infra.platform.tracking.forwarding import STATE, tracked
from ostinato.infra.platform.tracking.trackers import refuse_unknown_trackers

LIMIT_SECONDS = 60.0  # of what takes about two on an idle machine
# an outsider's package: one tracker writes a file, one fails, one never returns
MODULE = """
import json, os, time

class File:
    def __init__(self, run):
        self.niceness = os.nice(0)
        self.file = open(run.home / f"{run.group}.{run.name}.seen", "a")
    def log(self, step, values):
        print(json.dumps([step, values]), file=self.file, flush=True)
    def close(self):
        print('"closed"', file=self.file, flush=True)

class Nice(File):
    def log(self, step, values):
        super().log(step, {"opened": self.niceness, "logs": os.nice(0)})

def failing(run):
    raise OSError("no route to host")

class Hanging(File):
    def log(self, step, values):
        print(os.getpid(), file=self.file, flush=True)
        time.sleep(3600)
"""
ENTRY_POINTS = """
[ostinato.trackers]
file = seen_by:File
nice = seen_by:Nice
failing = seen_by:failing
hanging = seen_by:Hanging
"""
STARTER = """
import sys, time
from pathlib import Path
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.platform.tracking.forwarding import tracked

with tracked(Path(sys.argv[1]), load_settings()) as begin:
    begin()
    time.sleep(3600)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workspace of a stage, with the package installed where a child process finds it."""
    packages = tmp_path / "packages"
    info = packages / "seen_by-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "seen_by.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seen-by\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(packages), path])))
    place = tmp_path / "runs" / "nano-seed0" / "reinforced-1"
    place.mkdir(parents=True)
    return place


def settings_of(directory: Path, *trackers: str) -> Settings:
    return Settings(home=directory.parents[2], trackers=trackers)


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def seen(directory: Path) -> list:
    path = directory.parents[2] / "nano-seed0.reinforced-1.seen"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """What event files of TensorBoard hold: records of length, checksum, event, checksum."""
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            yield from ((one.tag, event.step, one.simple_value) for one in event.summary.value)


def test_numbers_of_each_step_reach_every_tracker_once_also_after_a_resume(
    directory: Path,
) -> None:
    log = MetricsLog(directory / METRICS)
    settings = settings_of(directory, "tensorboard", "file")
    with tracked(directory, settings) as begin:
        log.append(1, {"loss": 2.0, "phase": "bulk"})
        begin()
        begin()  # at each progress
        log.append(2, {"loss": 1.5})
    wait_for(lambda: "closed" in seen(directory))
    assert seen(directory) == [[1, {"loss": 2.0}], [2, {"loss": 1.5}], "closed"]
    folder = directory.parents[2] / "tensorboard" / "nano-seed0" / "reinforced-1"
    wait_for(lambda: len([*scalars(folder)]) == 2)

    log.append(3, {"loss": 1.0})
    with tracked(directory, settings) as begin:
        begin()
        wait_for(lambda: [3, {"loss": 1.0}] in seen(directory))
    wait_for(lambda: seen(directory).count("closed") == 2)
    assert seen(directory)[3:] == [[3, {"loss": 1.0}], "closed"]
    wait_for(lambda: len([*scalars(folder)]) == 3)
    assert sorted(scalars(folder)) == [("loss", 1, 2.0), ("loss", 2, 1.5), ("loss", 3, 1.0)]


def test_two_supervisors_of_one_stage_forward_it_once(directory: Path) -> None:
    settings = settings_of(directory, "file")
    MetricsLog(directory / METRICS).append(1, {"loss": 1.0})
    with tracked(directory, settings) as first, tracked(directory, settings) as second:
        first()
        second()
    wait_for(lambda: (directory / STATE).exists() and "closed" in seen(directory))
    assert seen(directory).count([1, {"loss": 1.0}]) == 1


def test_tracker_that_fails_is_one_warning_and_the_others_go_on(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MetricsLog(directory / METRICS).append(1, {"loss": 1.0})
    with caplog.at_level(logging.WARNING):
        with tracked(directory, settings_of(directory, "failing", "file")) as begin:
            begin()
        wait_for(lambda: bool(caplog.messages))
    [message] = caplog.messages
    assert "exit code 1" in message
    assert "no route to host" in (directory / "trackers.log").read_text()
    assert seen(directory) == [[1, {"loss": 1.0}], "closed"]


def test_stage_does_not_wait_for_a_tracker_that_hangs(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MetricsLog(directory / METRICS).append(1, {"loss": 1.0})
    patience = LIMIT_SECONDS
    with tracked(directory, settings_of(directory, "hanging"), timeout_seconds=patience) as begin:
        begin()
        wait_for(lambda: bool(seen(directory)))
    [pid] = seen(directory)
    with caplog.at_level(logging.WARNING):
        os.kill(pid, signal.SIGKILL)  # it is there, and the stage has ended
        wait_for(lambda: bool(caplog.messages))
    assert "exit code -9" in caplog.messages[0]


def test_tracker_that_hangs_is_ended(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    MetricsLog(directory / METRICS).append(1, {"loss": 1.0})
    with caplog.at_level(logging.WARNING):
        with tracked(directory, settings_of(directory, "hanging"), timeout_seconds=0.1) as begin:
            begin()
            wait_for(lambda: bool(seen(directory)))
        wait_for(lambda: bool(caplog.messages))
    assert "not done within 0.1 s" in caplog.messages[0]
    assert not psutil.pid_exists(seen(directory)[0])


def test_tracker_steps_back_from_the_work_only_when_it_is_open(directory: Path) -> None:
    MetricsLog(directory / METRICS).append(1, {"loss": 1.0})
    with tracked(directory, settings_of(directory, "nice")) as begin:
        begin()
        wait_for(lambda: bool(seen(directory)))
    own = os.nice(0)
    assert seen(directory)[0] == [1, {"opened": own, "logs": min(own + 10, 19)}]


def test_warning_of_a_tracker_reaches_the_log_of_the_run_that_waited(directory: Path) -> None:
    run: ContextVar[str] = ContextVar("run", default="no run")
    runs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: runs.append(run.get())  # type: ignore[method-assign]
    forwarding.logger.addHandler(handler)
    try:
        run.set("mine")
        with tracked(directory, settings_of(directory, "failing")) as begin:
            begin()
        wait_for(lambda: bool(runs))
    finally:
        forwarding.logger.removeHandler(handler)
    assert runs == ["mine"]


def test_trackers_are_closed_when_the_supervisor_is_killed(directory: Path) -> None:
    environment = {**os.environ, **settings_of(directory, "file").to_environment()}
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(directory)], env=environment)
    MetricsLog(directory / METRICS).append(1, {"loss": 1.0})
    wait_for(lambda: bool(seen(directory)))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_for(lambda: "closed" in seen(directory))


def test_without_trackers_nothing_starts(directory: Path) -> None:
    with tracked(directory, settings_of(directory)) as begin:
        begin()
    assert [*directory.iterdir()] == []


def test_unknown_tracker_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    refuse_unknown_trackers(Settings(home=tmp_path, trackers=("wandb", "mlflow", "trackio")))
    with pytest.raises(ConfigError, match=r"OSTINATO_TRACKERS: tracker is 'tensorbord', wanted"):
        refuse_unknown_trackers(Settings(home=tmp_path, trackers=("tensorbord",)))


def test_settings_hand_trackers_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_TRACKERS", "tensorboard, wandb")
    settings = Settings()
    assert settings.trackers == ("tensorboard", "wandb")
    assert settings.to_environment()["OSTINATO_TRACKERS"] == "tensorboard,wandb"

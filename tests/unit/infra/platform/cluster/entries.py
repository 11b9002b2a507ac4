"""Entries that the tests of the supervised child run."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, EngineError


class CountRequest(BaseModel):
    """Count up to `steps`, resuming from the checkpoint file."""

    steps: int
    seconds_a_step: float = 0.0
    release_file: str = ""
    grandchild: bool = False


class CountResult(BaseModel):
    """What was counted, and by whom."""

    counted: int
    steps_this_attempt: int
    pid: int


class FailRequest(BaseModel):
    """Fail in the given way."""

    how: Literal["config", "engine", "bug", "exit", "signal"]


def count(request: CountRequest, workspace: Workspace) -> CountResult:
    """Counts, one line a step in steps.txt, and waits for the release file if one is named.

    A release file that says "fail" fails it once.
    """
    checkpoint = workspace.directory / "checkpoint"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if request.grandchild:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (workspace.directory / "grandchild").write_text(str(sleeper.pid))
    for step in range(first, request.steps):
        with (workspace.directory / "steps.txt").open("a") as log:
            log.write(f"{step}\n")
        checkpoint.write_text(str(step + 1))
        workspace.progress.update(step + 1, request.steps, "counting", value=step)
        time.sleep(request.seconds_a_step)
    (workspace.directory / "waiting").touch()
    while request.release_file and not Path(request.release_file).exists():
        time.sleep(0.02)
    if request.release_file and Path(request.release_file).read_text() == "fail":
        Path(request.release_file).write_text("")
        raise EngineError("replica 3 is gone")
    return CountResult(
        counted=request.steps, steps_this_attempt=request.steps - first, pid=os.getpid()
    )


def nest(request: CountRequest, workspace: Workspace) -> CountResult:
    """Supervises two children in threads, as an evaluation does its shards, each with a process of its own."""

    def supervise(index: int) -> CountResult:
        return run_child(
            "tests.unit.infra.platform.cluster.entries:count",
            request.model_copy(update={"grandchild": True}),
            CountResult,
            directory=workspace.directory / f"nested{index}",
            on_progress=lambda seen: workspace.progress.update(seen.done, seen.total, "nested"),
        )

    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(supervise, range(2))
        return first


def nest_alone(request: CountRequest, workspace: Workspace) -> CountResult:
    """Supervises a child in the main thread."""
    return run_child(
        "tests.unit.infra.platform.cluster.entries:count",
        request.model_copy(update={"grandchild": True}),
        CountResult,
        directory=workspace.directory / "nested0",
    )


class DeviceResult(BaseModel):
    """GPUs that a stage may see; None: all of the machine."""

    visible: str | None


def see_devices(request: CountRequest, workspace: Workspace) -> DeviceResult:
    """Tells which GPUs it may see."""
    workspace.progress.update(request.steps, request.steps, "looked")
    return DeviceResult(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def fail(request: FailRequest, workspace: Workspace) -> CountResult:
    """Ends badly."""
    sys.stderr.write("what the child said before it ended\n")
    sys.stderr.flush()
    match request.how:
        case "config":
            raise ConfigError("learning_rate is -1, wanted above 0")
        case "engine":
            raise EngineError("replica 3 is gone")
        case "bug":
            raise ZeroDivisionError("division by zero")
        case "exit":
            sys.exit(7)
        case "signal":
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(workspace.directory)


def unannotated(request, workspace):
    """Has no request type."""
    return request, workspace

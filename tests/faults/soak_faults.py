"""The faults of a soak: what each one hits, on the processes of a running `ostinato up`."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil

from ostinato.flows.operating.local_prefect import prefect_environment
from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.services import ServiceGroup
from ostinato.infra.platform.cluster.workspace import PROCESS, ProcessMark, read_record
from tests.fakes.prefect_here import PrefectHere, open_api, wait_until
from tests.faults.test_up import Machine

CYCLE = "realtime-cycle/every-5-hours"
Answer = TypeVar("Answer")


class Missed(Exception):
    """A fault that found nothing to hit."""


@dataclass
class Target:
    """A home under `ostinato up`, its cycles on a schedule of seconds, and what was done to it."""

    machine: Machine
    line: str
    log: Path
    cycle_seconds: float
    dice: random.Random
    began: float = 0.0
    cancelled: set[str] = field(default_factory=set)
    away: list[tuple[float, float]] = field(default_factory=list)  # without schedule, from and to
    up: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        # the loop that plans runs looks once a minute else
        self.machine.environment["PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS"] = "5"
        settings = self.machine.settings
        told = prefect_environment(settings, settings.prefect_port)
        api = open_api(told)
        self.here = PrefectHere(settings, settings.prefect_port, told, ServiceGroup(), api)

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """Its answer, as soon as the server gives one."""
        deadline = time.monotonic() + 300
        while True:
            try:
                return call()
            except httpx2.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def start_up(self) -> None:
        """Runs `ostinato up`, and puts its cycles on the soak's schedule."""
        since = time.time()
        with self.log.open("a") as log:
            begin = log.tell()
            recipe = ("--recipe", self.machine.recipe, "--line", self.line)
            up = self.machine.start("up", *recipe, output=log)

        def is_up() -> bool:
            said = self.log.read_text()[begin:]
            assert up.poll() is None, said
            return "Ctrl-C ends" in said

        wait_until("up", is_up, 600)
        self.up = up
        self.began = self.began or time.time()
        self.set_schedule(active=True)
        self.away.append((since, time.time()))

    def set_schedule(self, *, active: bool) -> None:
        deployment = self.ask(lambda: self.here.deployment(CYCLE))
        [found] = deployment["schedules"]
        anchor = datetime.fromtimestamp(self.began, tz=UTC).isoformat()
        schedule = {**found["schedule"], "interval": self.cycle_seconds, "anchor_date": anchor}
        body = {"schedule": schedule, "active": active}
        url = f"deployments/{deployment['id']}/schedules/{found['id']}"
        self.ask(lambda: self.here.api.patch(url, json=body).raise_for_status())

    def runs(self, **wanted: Any) -> list[dict[str, Any]]:
        """Flow runs of all deployments."""
        body = {"flow_runs": wanted, "sort": "EXPECTED_START_TIME_ASC"}
        return self.ask(
            lambda: self.here.api.post("flow_runs/filter", json=body).raise_for_status().json()
        )

    def cycles(self) -> list[dict[str, Any]]:
        """Flow runs of the cycle's deployment that were due since the soak began."""
        deployment = self.ask(lambda: self.here.deployment(CYCLE))["id"]
        due = {
            "after_": datetime.fromtimestamp(self.began + 1, tz=UTC).isoformat(),
            "before_": datetime.now(tz=UTC).isoformat(),
        }
        return self.runs(deployment_id={"any_": [deployment]}, expected_start_time=due)

    def running_cycle(self) -> dict[str, Any]:
        found = [run for run in self.cycles() if run["state_type"] == "RUNNING"]
        if not found:
            raise Missed("no cycle runs")
        return found[0]

    def stages(self) -> list[ProcessMark]:
        """Stages under way."""
        paths = self.machine.home.glob(f"runs/*/*/{PROCESS}")
        marks = [read_record(path, ProcessMark) for path in paths]
        return [mark for mark in marks if mark is not None and is_alive(mark)]

    def stage(self) -> psutil.Process:
        found = self.stages()
        if not found:
            raise Missed("no stage runs")
        return psutil.Process(found[0].pid)

    def kill_service(self, name: str) -> str:
        pid = self.machine.pid_of(name)
        if not pid:
            raise Missed(f"{name} is dead already")
        os.killpg(pid, signal.SIGKILL)
        return f"{name}, process {pid}"


def _stop(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    time.sleep(seconds)
    try:
        process.resume()
    except psutil.NoSuchProcess:
        return


def kill_worker(target: Target) -> str:
    return target.kill_service("prefect-worker")


def kill_gateway(target: Target) -> str:
    return target.kill_service("gateway")


def kill_server(target: Target) -> str:
    return target.kill_service("prefect-server")


def silence_server(target: Target) -> str:
    pid = target.machine.pid_of("prefect-server")
    if not pid:
        raise Missed("the server is dead already")
    seconds = target.dice.uniform(10, 60)
    _stop(psutil.Process(pid), seconds)
    return f"{seconds:.0f} s"


def kill_engine(target: Target) -> str:
    run = target.running_cycle()
    try:
        target.here.engine_of(run["id"]).kill()
    except AssertionError as error:
        raise Missed(str(error)) from error
    return run["name"]


def kill_worker_and_engine(target: Target) -> str:
    hit = kill_engine(target)
    return f"{kill_worker(target)} and {hit}"


def kill_stage(target: Target) -> str:
    stage = target.stage()
    command = stage.cmdline()
    stage.kill()
    return Path(command[-1]).name


def kill_part_of_stage(target: Target) -> str:
    stage = target.stage()
    parts = stage.children(recursive=True)
    if not parts:
        raise Missed("the stage is one process")
    part = target.dice.choice(parts)
    name = part.name()
    part.kill()
    return f"{name} of {Path(stage.cmdline()[-1]).name}"


def stop_stage(target: Target) -> str:
    stage = target.stage()
    _stop(stage, 20)
    return f"20 s, process {stage.pid}"


def cancel_cycle(target: Target) -> str:
    run = target.running_cycle()
    target.cancelled.add(run["id"])
    target.ask(lambda: target.here.set_state(run["id"], "CANCELLING", "Cancelling"))
    return run["name"]


def trigger_twice(target: Target) -> str:
    deployment = target.ask(lambda: target.here.deployment(CYCLE))["id"]
    started = [target.here.start(deployment) for _ in range(2)]
    return " and ".join(target.here.api.get(f"flow_runs/{run}").json()["name"] for run in started)


def kill_up(target: Target) -> str:
    assert target.up is not None
    pid = target.up.pid
    target.up.kill()
    target.up.wait()
    time.sleep(target.dice.uniform(0, 20))
    target.start_up()
    return f"process {pid}"


FAULTS: dict[str, Callable[[Target], str]] = {
    function.__name__.replace("_", " "): function
    for function in (
        kill_worker,
        kill_engine,
        kill_worker_and_engine,
        kill_stage,
        kill_part_of_stage,
        stop_stage,
        kill_gateway,
        kill_server,
        silence_server,
        cancel_cycle,
        trigger_twice,
        kill_up,
    )
}

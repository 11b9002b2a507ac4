"""All services of this machine: Prefect server, deployments, worker and gateway, kept running until Ctrl-C.

Every process that `ostinato up` starts has a variable in its environment. The next `up` and `ostinato down` use it to
find processes that a killed `up` left.
"""

import contextlib
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx2
import psutil
from pydantic import Field
from rich.console import Console

from ostinato.flows.operating import local_prefect
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.operating.resuming import (
    interrupted_runs,
    name_waiting_runs,
    resume_overdue,
    schedule_again,
)
from ostinato.flows.stages.server_access import LOGIN_FILE, ServerAccess, own_access
from ostinato.infra.platform.cluster.child import note_ending
from ostinato.infra.platform.cluster.processes import (
    is_alive,
    kill_processes,
    kill_session,
    mark_process,
    processes_with,
)
from ostinato.infra.platform.cluster.services import ServiceGroup, answers, require_free_port
from ostinato.infra.platform.cluster.workspace import (
    PROCESS,
    ProcessMark,
    read_record,
    replace_text,
)
from ostinato.infra.platform.errors import ClusterError, ConfigError
from ostinato.infra.platform.extras import find_missing
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.gateway.config import LOCAL_KEYS_FILE

UP_FILE = "up.json"
UP_VARIABLE = "OSTINATO_UP"  # the home, in the environment of everything that `up` starts
END_SECONDS = 30.0
_POLL_SECONDS = 1.0
_RESUME_SECONDS = 20.0
# Stages do not match: they outlive a killed `up`, and the next one supervises them again.
_SUPERVISORS = ("-m prefect", "prefect.engine", "ostinato.flows.operating.")


class ServiceState(Record):
    """A service of a running `up`."""

    name: str
    process: ProcessMark | None = Field(description="None: dead, about to be restarted")
    since: float = Field(description="start or death of the service")
    log: str = Field(default="", description="path of its log")
    restarts: int = 0
    cause: str = Field(default="", description="cause of its last death")


class UpState(Record):
    """A running `up`, recorded in `up.json` of the home for other commands."""

    process: ProcessMark
    recipe: RecipeChoice
    since: float
    services: tuple[ServiceState, ...] = ()


def running_up(settings: Settings) -> UpState | None:
    """The running `up` of this home. None when there is none."""
    state = read_record(settings.home / UP_FILE, UpState)
    return state if state is not None and is_alive(state.process) else None


def _known_lines(settings: Settings) -> list[str]:
    with contextlib.closing(open_ledger(settings)) as ledger:
        return ledger.promotions.lines()


def up(settings: Settings, recipe: RecipeChoice, line: str | None, console: Console) -> None:
    """Starts everything and keeps it running until Ctrl-C. A service that dies is restarted."""
    served = recipe.load().served_line(line, _known_lines(settings) if line else ())
    recipe = recipe.with_whole_path()
    before = running_up(settings)
    if before is not None:
        _say_already_up(before, recipe, console)
        return
    kill_processes(_processes_of_up(settings, _SUPERVISORS))
    require_free_port(settings.prefect_port, "the Prefect server")
    require_free_port(settings.gateway_port, "the gateway")
    require_free_port(settings.dashboard_port, "the dashboard")
    began, access = time.time(), own_access(settings, settings.prefect_port)
    environment = {
        **local_prefect.prefect_environment(settings, settings.prefect_port),
        UP_VARIABLE: str(settings.home),
    }
    with ServiceGroup() as services:
        try:
            write_state(settings, recipe, began, services)
            services.start(
                local_prefect.server_service(settings, settings.prefect_port, environment)
            )
            _say(console, "Prefect UI", f"http://127.0.0.1:{settings.prefect_port}")
            _say(console, "login", f"the line in {settings.home / LOGIN_FILE}, user:password")
            local_prefect.deploy(environment, recipe)
            _say(
                console, "deployments", f"recipe {recipe}: {', '.join(local_prefect.flow_names())}"
            )
            cycle = local_prefect.next_cycle(datetime.now(tz=UTC))
            _say(console, "next cycle", f"{cycle:%Y-%m-%d %H:%M} UTC")
            # a starting server marks runs without a heartbeat as crashed, perhaps before this check
            for name in (*schedule_again(access), *resume_overdue(access, after_seconds=0.0)):
                _say(console, "resumes", name)
            services.start(local_prefect.worker(settings, environment))
            services.start(local_prefect.dashboard(settings, environment))
            _say(console, "dashboard", f"http://127.0.0.1:{settings.dashboard_port}")
            if served is None:
                _say(console, "gateway", f"none: recipe {recipe} has no serving line")
            elif missing := find_missing("serve"):
                _say(console, "gateway", f"none: {missing}")
            else:
                services.start(local_prefect.gateway(settings, environment, recipe, served))
                _say_gateway(settings, served, console)
            console.print(
                "Ctrl-C ends everything and lists what will resume; `ostinato down` ends it too."
            )
            write_state(settings, recipe, began, services)
            _keep_running(settings, recipe, began, services, environment, console)
        finally:
            _end(settings, services, access, console)


def down(settings: Settings, console: Console) -> None:
    """Ends the `up` of this home and all processes that a killed one left."""
    state = running_up(settings)
    if state is not None:
        process = psutil.Process(state.process.pid)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(END_SECONDS)
    found = _end_stages(settings) + sum(1 for _ in _processes_of_up(settings))
    kill_processes(_processes_of_up(settings))
    (settings.home / UP_FILE).unlink(missing_ok=True)
    if state is None and not found:
        console.print("nothing of `ostinato up` runs here")
    else:
        console.print("ended; `ostinato up` starts everything again and resumes unfinished runs")


def _keep_running(
    settings: Settings,
    recipe: RecipeChoice,
    began: float,
    services: ServiceGroup,
    environment: dict[str, str],
    console: Console,
) -> None:
    access = own_access(settings, settings.prefect_port)
    is_server_new, resumes_at = False, 0.0
    while True:
        for changed in services.mend(time.time()):
            name = changed.service.name
            if changed.starts_at is not None:
                wait = changed.starts_at - time.time()
                _say(console, name, f"{changed.cause}; starts again in {max(0.0, wait):.0f} s")
            else:
                _say(console, name, f"started again, time {changed.restarts}")
                is_server_new |= name == local_prefect.SERVER
            write_state(settings, recipe, began, services)
        if is_server_new and answers(f"{access.url}/health"):
            is_server_new = False
            if local_prefect.has_lost_database(access):
                _deploy_again(environment, recipe, console)
        if time.monotonic() > resumes_at:
            resumes_at = time.monotonic() + _RESUME_SECONDS
            with contextlib.suppress(httpx2.HTTPError):  # the server is down: retried later
                name_waiting_runs(access)
                for name in resume_overdue(access):
                    _say(console, "restarts", name)
        time.sleep(_POLL_SECONDS)


def _deploy_again(environment: dict[str, str], recipe: RecipeChoice, console: Console) -> None:
    try:
        local_prefect.deploy(environment, recipe)
        _say(console, "deployments", "deployed again: the server's database was lost")
    except ClusterError as error:
        _say(console, "deployments", f"lost with the database; restart `ostinato up`: {error}")


def _end(
    settings: Settings, services: ServiceGroup, access: ServerAccess, console: Console
) -> None:
    """Ends worker, gateway, engines and stages, then the server. Engines cannot report a crash, so the
    next `up` finds their runs unchanged and resumes them.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        services.stop({"prefect-worker"}, at_once=True)
        kill_processes(_processes_of_up(settings, ("prefect.engine",)))
        services.stop({"gateway"})
        num_stages = _end_stages(settings)
        with contextlib.suppress(httpx2.HTTPError):
            for run in interrupted_runs(access):
                _say(console, "will resume", f"{run.title} with the next `ostinato up`")
        if num_stages:
            _say(console, "stages", f"{num_stages} ended; each resumes from its last checkpoint")
        services.stop()
        kill_processes(_processes_of_up(settings))
        (settings.home / UP_FILE).unlink(missing_ok=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end_stages(settings: Settings) -> int:
    """Ends the stages that runs of `up` started. Returns their number."""
    ours = set(_processes_of_up(settings))
    num_ended = 0
    for path in settings.home.glob(f"runs/*/*/{PROCESS}"):
        mark = read_record(path, ProcessMark)
        if mark is not None and mark.pid in ours and is_alive(mark):
            note_ending(path.parent, "ended with `ostinato up`")
            kill_session(mark)
            num_ended += 1
    return num_ended


def _processes_of_up(settings: Settings, words: Sequence[str] = ()) -> list[int]:
    """Live processes that an `up` of this home started."""
    return list(processes_with(UP_VARIABLE, str(settings.home), words))


def write_state(
    settings: Settings, recipe: RecipeChoice, began: float, services: ServiceGroup
) -> None:
    """Records this process as the running `up`, with the state of its services."""
    states = tuple(
        ServiceState(
            name=running.service.name,
            process=None if running.starts_at else mark_process(running.process.pid),
            since=running.ended_at or running.since,
            log=str(running.service.log_path),
            restarts=running.restarts,
            cause=running.cause,
        )
        for running in services.running
        if running.starts_at or running.process.poll() is None
    )
    own = mark_process(psutil.Process().pid)
    state = UpState(process=own, recipe=recipe, since=began, services=states)
    settings.home.mkdir(parents=True, exist_ok=True)
    replace_text(settings.home / UP_FILE, state.model_dump_json(indent=1))


def _say_already_up(state: UpState, recipe: RecipeChoice, console: Console) -> None:
    if state.recipe != recipe:
        raise ConfigError(
            f"`ostinato up` runs as process {state.process.pid} with recipe {state.recipe}, "
            f"wanted {recipe}; `ostinato down` ends it"
        )
    _say(console, "already up", f"process {state.process.pid}; `ostinato down` ends it")


def _say_gateway(settings: Settings, line: str, console: Console) -> None:
    url = f"http://127.0.0.1:{settings.gateway_port}"
    when = "" if answers(f"{url}/healthz") else f", as soon as line {line} has a checkpoint"
    _say(console, "gateway", f"{url}/v1{when}")
    _say(
        console,
        "key",
        f"tenant local in {settings.home / LOCAL_KEYS_FILE}, made with the first start",
    )


def _say(console: Console, what: str, text: str) -> None:
    console.out(f"{what:<14} {text}", highlight=False)

"""Prefect on this machine: a server for one run, or server, worker, deployments and gateway together."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2
import yaml
from rich.console import Console

from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.stages.server_access import (
    LOGIN_FILE,
    SERVER_MODULE,
    ServerAccess,
    ask,
    is_own_server,
    open_api,
    own_access,
    prefect_home,
    read_login,
)
from ostinato.infra.platform.cluster.services import (
    Service,
    ServiceGroup,
    answers,
    await_ready,
    find_free_port,
)
from ostinato.infra.platform.errors import ClusterError, ConfigError
from ostinato.infra.platform.settings import Settings

# folder with prefect.yaml: the checkout, or `ostinato` in site-packages
REPOSITORY = Path(__file__).resolve().parents[2]
WORK_POOL = "ostinato"
DEPLOYED, AUTO_RESUME, OPERATION = "ostinato", "auto-resume", "operation"  # tags in prefect.yaml
IMAGE_REPOSITORY = (
    "/opt/ostinato"  # OSTINATO_REPOSITORY of the image that infra/deploy/Containerfile makes
)
PREFECT = (sys.executable, "-P", "-m", "prefect")
SERVER = "prefect-server"
HEARTBEAT, HEARTBEAT_SECONDS = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", 30
_TIMEOUT_SECONDS = 310.0  # longer than the limit of the process that starts the server
_EMPTY_DATABASE = Path(sys.prefix) / "share" / "prefect" / "prefect.db"  # made by `make setup`


class PoolType(StrEnum):
    """Kinds of workers, which decide where the process of a flow run starts."""

    PROCESS = "process"
    DOCKER = "docker"
    KUBERNETES = "kubernetes"


def deployments() -> list[dict[str, Any]]:
    """The deployments of prefect.yaml."""
    return yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]


def next_cycle(now: datetime) -> datetime:
    """The first time after `now` at which the schedule of prefect.yaml starts a real-time cycle."""
    [schedule] = [
        schedule
        for item in deployments()
        for schedule in item.get("schedules", ())
        if "interval" in schedule
    ]
    anchor = datetime.fromisoformat(schedule["anchor_date"])
    interval = timedelta(seconds=schedule["interval"])
    return anchor + interval * ((now - anchor) // interval + 1)


def flow_names() -> list[str]:
    """Flows that run by name: those that prefect.yaml deploys, except operations."""
    return sorted(
        {
            item["entrypoint"].rpartition(".")[2]
            for item in deployments()
            if OPERATION not in item["tags"]
        }
    )


def prefect_environment(settings: Settings, port: int) -> dict[str, str]:
    """Environment of every Prefect process. The reasons are in decision 0003."""
    url, login = f"http://127.0.0.1:{port}/api", read_login(settings.home)
    return {
        "PREFECT_HOME": str(prefect_home(settings.home)),
        "PREFECT_API_URL": url,
        "PREFECT_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        HEARTBEAT: str(HEARTBEAT_SECONDS),
        # waits 2, 4, ... 512 s, so that a run survives a server outage of a quarter of an hour
        "PREFECT_CLIENT_MAX_RETRIES": "9",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "ostinato",
        "OSTINATO_HOME": str(settings.home.resolve()),
        "OSTINATO_REPOSITORY": str(REPOSITORY),
        "PYTHONSAFEPATH": "1",
    }


def use_own_server(settings: Settings) -> None:
    """Sends events of this process to the server of a running `ostinato up`, unless PREFECT_API_URL names a server."""
    if "PREFECT_API_URL" not in os.environ and is_own_server(settings.prefect_port, settings.home):
        own = prefect_environment(settings, settings.prefect_port)
        names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
        os.environ.update({name: own[name] for name in names})


def named_server(settings: Settings) -> ServerAccess:
    """The server that this user's commands talk to: that of PREFECT_API_URL, else the one on the home's port. Somebody
    else's server on that port does not get the home's login.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return ServerAccess(url, os.environ.get("PREFECT_API_AUTH_STRING"))
    if is_own_server(settings.prefect_port, settings.home):
        return own_access(settings, settings.prefect_port)
    return ServerAccess(f"http://127.0.0.1:{settings.prefect_port}/api")


def await_server() -> None:
    """Waits for a server that is starting at the same time. Prefect itself reports a server that never starts."""
    url, deadline = os.environ.get("PREFECT_API_URL"), time.monotonic() + _TIMEOUT_SECONDS
    while url and not answers(f"{url}/health") and time.monotonic() < deadline:
        time.sleep(0.1)


def server_service(settings: Settings, port: int, environment: dict[str, str]) -> Service:
    """The Prefect server of this machine on a port."""
    _copy_empty_database(Path(environment["PREFECT_HOME"]) / "prefect.db")
    return Service(
        name=SERVER,
        command=[sys.executable, "-P", "-m", SERVER_MODULE, "--port", str(port)],
        log_path=settings.home / "logs" / "prefect-server.log",
        environment=environment,
        is_ready=lambda: (
            is_own_server(port, settings.home) and answers(f"http://127.0.0.1:{port}/api/health")
        ),
    )


def _copy_empty_database(path: Path) -> None:
    """Copies the empty database if there is none, because Prefect takes six seconds to make its own. Only the user may
    open the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    if path.exists() or not os.access(_EMPTY_DATABASE, os.R_OK):
        return
    part = path.with_suffix(".part")
    shutil.copyfile(_EMPTY_DATABASE, part)
    part.replace(path)


@contextlib.contextmanager
def server(
    settings: Settings, console: Console
) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """A Prefect server for the duration of the block, or the server of a running `ostinato up` of this home. Yields the
    environment, and a function that waits until the server answers.
    """
    if is_own_server(settings.prefect_port, settings.home):
        yield prefect_environment(settings, settings.prefect_port), lambda: None
        return
    port = find_free_port()
    environment = prefect_environment(settings, port)
    with ServiceGroup() as services:
        starting = services.launch(server_service(settings, port, environment))
        address = f"http://127.0.0.1:{port}, login: the line in {settings.home / LOGIN_FILE}"
        console.out(f"Prefect UI while this runs: {address}", highlight=False)
        yield environment, lambda: await_ready(starting)


def has_lost_database(access: ServerAccess) -> bool:
    """Whether a server has no deployments, which means that its database is new."""
    with contextlib.suppress(httpx2.HTTPError), open_api(access) as api:
        return ask(api, "/deployments/count", {}) == 0
    return False


def deploy(
    environment: Mapping[str, str],
    recipe: RecipeChoice,
    pool: PoolType = PoolType.PROCESS,
    image: str | None = None,
) -> None:
    """Deploys a recipe to the server of the environment. ClusterError when that fails."""
    command = [sys.executable, "-P", "-m", "ostinato.flows.operating.deploying"]
    command += [*recipe.arguments(), "--pool", pool.value]
    command += [] if image is None else ["--image", image]
    merged = {**os.environ, **environment}
    done = subprocess.run(command, env=merged, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(
            f"deploying to {environment.get('PREFECT_API_URL')} failed: {done.stderr[-800:]}"
        )


def deploy_elsewhere(
    settings: Settings, recipe: RecipeChoice, pool: PoolType, image: str | None
) -> str:
    """Deploys to the server that the user's environment names. Returns its address."""
    if image is not None and pool == PoolType.PROCESS:
        raise ConfigError(
            f"--image is {image!r} with --pool process, wanted --pool docker or kubernetes"
        )
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise ConfigError(
            "PREFECT_API_URL is not set, wanted the address of your Prefect server, for example "
            "http://prefect.example:4200/api; `ostinato up` starts a server here and deploys to it"
        )
    own = prefect_environment(settings, settings.prefect_port)
    kept = ("OSTINATO_HOME", "OSTINATO_REPOSITORY", "PYTHONSAFEPATH", "DO_NOT_TRACK")
    place = {name: os.environ.get(name, own[name]) for name in kept}
    if pool != PoolType.PROCESS:
        place["OSTINATO_REPOSITORY"] = os.environ.get("OSTINATO_REPOSITORY", IMAGE_REPOSITORY)
    deploy({**place, "PREFECT_API_URL": url}, recipe, pool, image)
    return url


def worker(settings: Settings, environment: dict[str, str]) -> Service:
    """The worker that runs deployments on this machine."""
    command = [*PREFECT, "worker", "start", "--pool", WORK_POOL]
    return _service("prefect-worker", command, settings, environment)


def dashboard(settings: Settings, environment: dict[str, str]) -> Service:
    """The dashboard of this machine."""
    command = [sys.executable, "-P", "-m", "ostinato.flows.operating.dashboard.server"]
    return _service("dashboard", command, settings, environment)


def gateway(
    settings: Settings, environment: dict[str, str], recipe: RecipeChoice, line: str
) -> Service:
    """The gateway of a serving line. It waits itself for the line's first checkpoint."""
    module = "ostinato.flows.operating.gateway_process"
    command = [sys.executable, "-P", "-m", module, *recipe.arguments(), "--line", line]
    return _service("gateway", command, settings, environment)


def _service(
    name: str, command: list[str], settings: Settings, environment: dict[str, str]
) -> Service:
    log = settings.home / "logs" / f"{name}.log"
    return Service(name=name, command=command, log_path=log, environment=environment)

"""Prefect on this machine: a server for one run, or server, worker, deployments and gateway together."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich.console import Console

import ostinato
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.services import (
    Service,
    ServiceGroup,
    answers,
    find_free_port,
    require_free_port,
)
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings

# holds prefect.yaml: the checkout, or `ostinato` in site-packages
REPOSITORY = Path(__file__).resolve().parent.parent
IMPORT_ROOT = Path(ostinato.__file__).parents[1]
WORK_POOL = "ostinato"
_PREFECT = (sys.executable, "-P", "-m", "prefect")


def flow_names() -> list[str]:
    """The flows that can be run by name: those that prefect.yaml deploys."""
    deployments = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    return sorted(item["entrypoint"].rpartition(".")[2] for item in deployments)


def prefect_environment(settings: Settings, port: int) -> dict[str, str]:
    """Environment of every Prefect process. The reasons are in DECISIONS.md under "Prefect settings"."""
    home = settings.home.resolve() / "prefect"
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # waits 2, 4, ... 512 s: a server that is away for a quarter of an hour is waited for
        "PREFECT_CLIENT_MAX_RETRIES": "9",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "ostinato",
        "OSTINATO_HOME": str(settings.home.resolve()),
        "OSTINATO_REPOSITORY": str(REPOSITORY),
        # what the user put there stays: plug-ins may be found by it
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(IMPORT_ROOT), os.environ.get("PYTHONPATH", "")))
        ),
        "PYTHONSAFEPATH": "1",
    }


def server_service(settings: Settings, port: int, environment: dict[str, str]) -> Service:
    """The Prefect server of this machine on a port."""
    return Service(
        name="prefect-server",
        command=[*_PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        log_path=settings.home / "logs" / "prefect-server.log",
        environment=environment,
        is_ready=lambda: answers(f"http://127.0.0.1:{port}/api/health"),
    )


@contextlib.contextmanager
def server(settings: Settings, console: Console) -> Iterator[dict[str, str]]:
    """A Prefect server for the length of the block. A running `ostinato up` is used instead. Yields the environment."""
    if answers(f"http://127.0.0.1:{settings.prefect_port}/api/health"):
        yield prefect_environment(settings, settings.prefect_port)
        return
    port = find_free_port()
    environment = prefect_environment(settings, port)
    with ServiceGroup() as services:
        services.start(server_service(settings, port, environment))
        console.print(f"Prefect UI while this runs: http://127.0.0.1:{port}", highlight=False)
        yield environment


def deploy(environment: dict[str, str]) -> None:
    """Deploys what prefect.yaml says to the server of the environment, and makes its work pool."""
    _prefect(environment, "work-pool", "create", WORK_POOL, "--type", "process", "--overwrite")
    _prefect(environment, "--no-prompt", "deploy", "--all")


def worker(settings: Settings, environment: dict[str, str]) -> Service:
    """The worker that runs deployments on this machine."""
    return Service(
        name="prefect-worker",
        command=[*_PREFECT, "worker", "start", "--pool", WORK_POOL],
        log_path=settings.home / "logs" / "prefect-worker.log",
        environment=environment,
    )


def _gateway(
    settings: Settings, environment: dict[str, str], recipe: str, line: str, *, has_model: bool
) -> Service:
    module = "ostinato.flows.gateway_process"
    return Service(
        name="gateway",
        command=[sys.executable, "-P", "-m", module, "--recipe", recipe, "--line", line],
        log_path=settings.home / "logs" / "gateway.log",
        environment=environment,
        is_ready=lambda: (
            not has_model or answers(f"http://127.0.0.1:{settings.gateway_port}/healthz")
        ),
    )


def up(settings: Settings, recipe: str, line: str | None, console: Console) -> None:
    """Starts everything and blocks until Ctrl-C or until a service dies. The gateway answers as soon
    as its serving line has a checkpoint.
    """
    served = load_recipe(recipe).served_line(line)
    with contextlib.closing(open_ledger(settings)) as ledger:
        has_model = served is not None and ledger.promotions.current(served) is not None
    require_free_port(settings.prefect_port, "the Prefect server")
    require_free_port(settings.gateway_port, "the gateway")
    environment = prefect_environment(settings, settings.prefect_port)
    with ServiceGroup() as services:
        services.start(server_service(settings, settings.prefect_port, environment))
        console.print(f"Prefect UI   http://127.0.0.1:{settings.prefect_port}", highlight=False)
        deploy(environment)
        console.print("deployments  " + ", ".join(flow_names()), highlight=False, soft_wrap=True)
        services.start(worker(settings, environment))
        if served is None:
            console.print(f"gateway      none: recipe {recipe} has no serving line")
        else:
            services.start(_gateway(settings, environment, recipe, served, has_model=has_model))
            when = "" if has_model else f", once line {served} has a checkpoint"
            url = f"http://127.0.0.1:{settings.gateway_port}/v1"
            console.print(f"gateway      {url}{when}", highlight=False)
        console.print(
            "Ctrl-C ends all of it; a stage under way goes on to its end and is found again."
        )
        services.watch()


def _prefect(environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [*_PREFECT, *arguments],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(
            f"`prefect {' '.join(arguments)}` ended with code {done.returncode}: {done.stderr[-800:]}"
        )

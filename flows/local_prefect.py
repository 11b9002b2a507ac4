"""Prefect on this machine: a server for one run, or server, worker, deployments and gateway together.

It defines no flow.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich.console import Console

import ostinato
from ostinato.infra.platform.cluster.services import (
    Service,
    ServiceGroup,
    answers,
    find_free_port,
    require_free_port,
)
from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.platform.settings import Settings

# holds prefect.yaml: the checkout, or `ostinato` in site-packages
REPOSITORY = Path(__file__).resolve().parent.parent
IMPORT_ROOT = Path(ostinato.__file__).parents[1]
WORK_POOL = "ostinato"


def flow_names() -> list[str]:
    """The flows that can be run by name: those that prefect.yaml deploys."""
    deployments = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    return sorted(Path(item["entrypoint"].partition(":")[0]).stem for item in deployments)


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
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,infra,models",
        "OSTINATO_HOME": str(settings.home.resolve()),
        "OSTINATO_REPOSITORY": str(REPOSITORY),
        "PYTHONPATH": str(IMPORT_ROOT),
    }


def _server(settings: Settings, port: int, environment: dict[str, str]) -> Service:
    return Service(
        name="prefect-server",
        command=[
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ],
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
        services.start(_server(settings, port, environment))
        console.print(f"Prefect UI while this runs: http://127.0.0.1:{port}", highlight=False)
        yield environment


def up(settings: Settings, recipe: str, console: Console) -> None:
    """Starts everything and blocks until Ctrl-C or until a service dies."""
    require_free_port(settings.prefect_port, "the Prefect server")
    require_free_port(settings.gateway_port, "the gateway")
    environment = prefect_environment(settings, settings.prefect_port)
    with ServiceGroup() as services:
        services.start(_server(settings, settings.prefect_port, environment))
        console.print(f"Prefect UI   http://127.0.0.1:{settings.prefect_port}", highlight=False)
        _prefect(environment, "work-pool", "create", WORK_POOL, "--type", "process", "--overwrite")
        _prefect(environment, "--no-prompt", "deploy", "--all")
        console.print("deployments  " + ", ".join(flow_names()), highlight=False, soft_wrap=True)
        services.start(
            Service(
                name="prefect-worker",
                command=[sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL],
                log_path=settings.home / "logs" / "prefect-worker.log",
                environment=environment,
            )
        )
        services.start(
            Service(
                name="gateway",
                command=[
                    sys.executable,
                    "-m",
                    "ostinato.flows.gateway_process",
                    "--recipe",
                    recipe,
                ],
                log_path=settings.home / "logs" / "gateway.log",
                environment=environment,
                is_ready=lambda: answers(f"http://127.0.0.1:{settings.gateway_port}/healthz"),
            )
        )
        console.print(f"gateway      http://127.0.0.1:{settings.gateway_port}/v1", highlight=False)
        console.print("Ctrl-C ends all of it.")
        services.watch()


def _prefect(environment: dict[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "prefect", *arguments]
    done = subprocess.run(
        command,
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

"""Prefect as `ostinato up` runs it, without a gateway: server, deployments and worker of a home of
their own, asked over the server's API.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from ostinato.flows.operating import local_prefect
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.stages import server_access
from ostinato.flows.stages.server_access import ServerAccess, own_access
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings

_BUSY = httpx2.codes.SERVICE_UNAVAILABLE


class _PatientTransport(httpx2.HTTPTransport):
    """Asks again for as long as the server says that its SQLite file is busy."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        while (answer := super().handle_request(request)).status_code == _BUSY:
            answer.close()
            time.sleep(0.5)
        return answer


def open_api(told: Mapping[str, str]) -> httpx2.Client:
    """A client of the API of the server that processes are told of."""
    access = ServerAccess(told["PREFECT_API_URL"], told["PREFECT_API_AUTH_STRING"])
    with server_access.open_api(access) as api:
        return httpx2.Client(
            base_url=access.url, timeout=120, transport=_PatientTransport(), auth=api.auth
        )


@dataclass
class PrefectHere:
    """A running server and worker."""

    settings: Settings
    port: int
    environment: dict[str, str]
    services: ServiceGroup
    api: httpx2.Client

    @property
    def access(self) -> ServerAccess:
        """As the home's own commands have it."""
        return own_access(self.settings, self.port)

    def deployment(self, name: str) -> dict[str, Any]:
        """A deployment by "flow/deployment"."""
        return self.api.get(f"deployments/name/{name}").raise_for_status().json()

    def runs(self, deployment_id: str) -> list[dict[str, Any]]:
        """All runs of a deployment."""
        wanted = {"deployments": {"id": {"any_": [deployment_id]}}}
        return self.api.post("flow_runs/filter", json=wanted).raise_for_status().json()

    def start(self, deployment_id: str, **parameters: Any) -> str:
        """A new run of a deployment, by hand."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        answer = self.api.post(f"deployments/{deployment_id}/create_flow_run", json=body)
        return answer.raise_for_status().json()["id"]

    def state(self, run_id: str) -> dict[str, Any]:
        """State of a run."""
        return self.api.get(f"flow_runs/{run_id}").raise_for_status().json()["state"]

    def set_state(self, run_id: str, kind: str, name: str) -> None:
        """What the buttons of the UI do."""
        body = {"state": {"type": kind, "name": name}, "force": False}
        self.api.post(f"flow_runs/{run_id}/set_state", json=body).raise_for_status()

    def engine_of(self, run_id: str) -> psutil.Process:
        """The process that runs a flow run."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", "") == (
                    run_id.replace("-", "")
                ) and "engine" in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no process runs {run_id}")

    @contextmanager
    def without_server(self) -> Iterator[None]:
        """The server is killed for the length of the block, then started again."""
        found = [
            item.pid
            for item in psutil.net_connections("tcp")
            if item.status == psutil.CONN_LISTEN and item.laddr[1:2] == (self.port,)
        ]
        assert found, f"nothing listens on port {self.port}"
        assert found[0], f"who listens on port {self.port} is another user's"
        os.killpg(os.getpgid(found[0]), signal.SIGKILL)
        yield
        self.services.start(
            local_prefect.server_service(self.settings, self.port, self.environment)
        )


def wait_until(what: str, is_so: Callable[[], Any], limit_seconds: float) -> Any:
    """The first true answer; AssertionError when it takes longer."""
    deadline = time.monotonic() + limit_seconds
    while not (answer := is_so()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_seconds:.0f} s"
        time.sleep(0.5)
    return answer


@contextmanager
def prefect_here(home: Path, **environment: str) -> Iterator[PrefectHere]:
    """Everything up for the length of the block; `environment` overrides what processes are told."""
    settings = Settings(home=home)
    port = find_free_port()
    told = {**local_prefect.prefect_environment(settings, port), **environment}
    with (
        ServiceGroup() as services,
        open_api(told) as api,
    ):
        services.start(local_prefect.server_service(settings, port, told))
        local_prefect.deploy(told, RecipeChoice(name="nano"))
        services.start(local_prefect.worker(settings, told))
        yield PrefectHere(settings, port, told, services, api)


def run_python(environment: Mapping[str, str], program: str) -> str:
    """What a program prints in the environment of the server's processes."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

"""How faults around a Prefect server come about, on a real server that the tests of a module share."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2

from ostinato.flows.operating import local_prefect
from ostinato.flows.stages.server_access import listener
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from tests.fakes.prefect_here import open_api
from tests.faults.injections import Scene, wait_for


@dataclass
class PrefectServer:
    """A server without deployments of ours and without a worker."""

    home: Path
    port: int
    api: httpx2.Client
    pool: str = field(default_factory=lambda: f"pool-{uuid.uuid4().hex[:6]}")

    def post(self, path: str, **body: Any) -> Any:
        """Answer of the API."""
        answer = self.api.post(path, json=body).raise_for_status()
        return answer.json() if answer.content else None

    def beat(self, name: str, seconds: int) -> None:
        """A heartbeat of a worker of the pool, as one that beats this often sends it."""
        self.post(
            f"work_pools/{self.pool}/workers/heartbeat",
            name=name,
            heartbeat_interval_seconds=seconds,
        )

    def deployment(self, **options: Any) -> str:
        """A new deployment in the pool."""
        flow = self.post("flows/", name="stands")
        made = self.post(
            "deployments/", name="by-hand", flow_id=flow["id"], work_pool_name=self.pool, **options
        )
        return made["id"]

    def run(self, deployment: str, due: datetime | None = None) -> str:
        """A run of a deployment."""
        details = {"scheduled_time": (due or datetime.now(tz=UTC)).isoformat()}
        state = {"type": "SCHEDULED", "state_details": details}
        return self.post(f"deployments/{deployment}/create_flow_run", state=state)["id"]

    def set_state(self, run: str, kind: str) -> None:
        """Puts a run into a state, whatever it was in."""
        self.post(f"flow_runs/{run}/set_state", state={"type": kind}, force=True)

    def leave_run(self, kind: str) -> float:
        """A run in a state, of which nothing comes though a worker is there; when it was put into it."""
        self.beat("here", seconds=30)
        self.set_state(self.run(self.deployment()), kind)
        return time.time()

    @contextmanager
    def clean(self) -> Iterator[None]:
        """A pool for the length of the block, gone after it with its deployments and runs."""
        self.post("work_pools/", name=self.pool, type="process")
        try:
            yield
        finally:
            for run in self.post("flow_runs/filter"):
                self.api.delete(f"flow_runs/{run['id']}").raise_for_status()
            for deployment in self.post("deployments/filter"):
                self.api.delete(f"deployments/{deployment['id']}").raise_for_status()
            self.api.delete(f"work_pools/{self.pool}").raise_for_status()


@contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """A running server."""
    settings, port = Settings(home=home), find_free_port()
    environment = local_prefect.prefect_environment(settings, port)
    with ServiceGroup() as services, open_api(environment) as api:
        services.start(local_prefect.server_service(settings, port, environment))
        yield PrefectServer(home, port, api)


@contextmanager
def silent_server(scene: Scene, server: PrefectServer) -> Iterator[None]:
    found = listener(server.port)
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(found.pid, signal.SIGCONT)


@contextmanager
def silent_worker(scene: Scene, server: PrefectServer) -> Iterator[None]:
    server.beat("gone", seconds=1)
    scene.since = time.time()
    url = f"work_pools/{server.pool}/workers/filter"
    wait_for(lambda: server.post(url)[0]["status"] == "OFFLINE")
    yield


@contextmanager
def late_run(scene: Scene, server: PrefectServer) -> Iterator[None]:
    due = datetime.now(tz=UTC) - timedelta(minutes=5)
    server.run(server.deployment(), due)
    scene.since = due.timestamp()
    yield


@contextmanager
def leaked_lease(scene: Scene, server: PrefectServer) -> Iterator[None]:
    deployment = server.deployment(concurrency_limit=1)
    server.post(
        "v2/concurrency_limits/increment-with-lease",
        slots=1,
        names=[f"deployment:{deployment}"],
        lease_duration=300,
    )
    scene.since = time.time()
    scene.limit(lease=0.0)
    yield


@contextmanager
def lost_run(scene: Scene, server: PrefectServer) -> Iterator[None]:
    scene.since = server.leave_run("RUNNING")
    yield


@contextmanager
def stuck_run(scene: Scene, server: PrefectServer) -> Iterator[None]:
    scene.since = server.leave_run("PENDING")
    scene.limit(pending=0.0)
    yield


PREFECT_INJECTIONS: dict[str, Callable[[Scene, PrefectServer], AbstractContextManager[None]]] = {
    function.__name__.replace("_", "-"): function
    for function in (silent_server, silent_worker, late_run, leaked_lease, lost_run, stuck_run)
}
